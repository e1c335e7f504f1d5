package outbox

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/internal/tables"
)

// The bounds of a Config.
const (
	maxNameBytes      = 100
	maxPartitions     = 10_000
	maxBatchSize      = 10_000
	maxDeliverTimeout = time.Hour
	minPollInterval   = 10 * time.Millisecond
	maxInterval       = 24 * time.Hour
)

// validate returns everything that is wrong with the configuration. Each error
// names the field, its value and what would be right.
func (c *Config) validate() error {
	p := &problems{}
	c.checkInstance(p)
	c.checkWorkers(p)
	c.checkListener(p)
	c.checkDefaultOutbox(p)
	c.checkRelays(p)
	for i := range c.Outboxes {
		c.checkOutbox(p, i)
	}
	c.checkTables(p)
	return errors.Join(p.errs...)
}

func (c *Config) checkInstance(p *problems) {
	if len(c.Outboxes) == 0 {
		p.add("Outboxes", "is empty; it must have at least one outbox")
	}
	if c.Name != "" {
		p.checkName("Name", c.Name)
	}
	if c.Notify < AfterCommit || c.Notify > Off {
		p.add("Notify", "is %d; it must be AfterCommit, InTransaction or Off", c.Notify)
	}
}

func (c *Config) checkWorkers(p *problems) {
	if d := c.PollInterval; d != 0 && (d < minPollInterval || d > maxInterval) {
		p.add("PollInterval", "is %v; it must be from %v to %v, or 0 for the default", d, minPollInterval, maxInterval)
	}
	if d := c.StopTimeout; d < 0 || d > maxInterval {
		p.add("StopTimeout", "is %v; it must be positive and at most %v, or 0 for the default", d, maxInterval)
	}
	if n := c.MaxDeliveries; n < 0 {
		p.add("MaxDeliveries", "is %d; it must be positive, or 0 for the default", n)
	}
}

func (c *Config) checkListener(p *problems) {
	switch {
	case c.ListenDSN != "" && c.Listen != nil:
		p.add("ListenDSN", "and Config.Listen are both set; only one of them may be")
	case c.Notify == Off && (c.ListenDSN != "" || c.Listen != nil):
		p.add("Notify", "is Off, so that ListenDSN and Listen must not be set")
	}
	if c.ListenDSN == "" {
		return
	}
	if _, err := pgx.ParseConfig(c.ListenDSN); err != nil {
		p.add("ListenDSN", "must be a PostgreSQL connection string: %w", err)
	}
}

func (c *Config) checkDefaultOutbox(p *problems) {
	names := c.names()
	switch {
	case c.DefaultOutbox == NoDefault || len(names) == 0:
	case c.DefaultOutbox == "" && len(names) > 1:
		p.add("DefaultOutbox", "is empty although there are %d outboxes; it must be one of %s, or NoDefault if messages name theirs", len(names), quoted(names))
	case c.DefaultOutbox != "" && !slices.Contains(names, c.DefaultOutbox):
		p.add("DefaultOutbox", "is %q; it must be one of %s, or NoDefault", c.DefaultOutbox, quoted(names))
	}
}

func (c *Config) checkRelays(p *problems) {
	names := c.names()
	for _, name := range slices.Sorted(maps.Keys(c.Relays)) {
		field := fmt.Sprintf("Relays[%q]", name)
		switch {
		case !slices.Contains(names, name):
			p.add(field, "is for an outbox that is not configured; it must be one of %s", quoted(names))
		case c.Relays[name] == nil:
			p.add(field, "is nil; leave it out in a binary that only publishes, or use Elsewhere")
		}
	}
}

func (c *Config) checkOutbox(p *problems, i int) {
	o := &c.Outboxes[i]
	field := func(name string) string { return fmt.Sprintf("Outboxes[%d] (%q).%s", i, excerpt(o.Name), name) }

	p.checkName(field("Name"), o.Name)
	for j, other := range c.Outboxes[:i] {
		if other.Name == o.Name {
			p.add(field("Name"), "is also that of Config.Outboxes[%d]; names must differ", j)
		}
	}
	if o.Relay != nil && c.Relays[o.Name] != nil {
		p.add(field("Relay"), "and Config.Relays[%q] are both set; only one of them may be", o.Name)
	}
	o.checkOrder(p, field)
	o.checkBatch(p, field)
	o.checkRetry(p, field)
}

func (o *Outbox) checkOrder(p *problems, field func(string) string) {
	if o.Partitions < 0 || o.Partitions > maxPartitions {
		p.add(field("Partitions"), "is %d; it must be from 1 to %d, or 0 for what the database records", o.Partitions, maxPartitions)
	}
	switch {
	case o.Ordering < ByGroup || o.Ordering > None:
		p.add(field("Ordering"), "is %d; it must be ByGroup, Total or None", o.Ordering)
	case o.Ordering == Total && o.Partitions > 1:
		p.add(field("Partitions"), "is %d although Ordering is Total; it must be 1, or 0", o.Partitions)
	}
	switch {
	case o.AfterDead < Continue || o.AfterDead > HoldGroup:
		p.add(field("AfterDead"), "is %d; it must be Continue or HoldGroup", o.AfterDead)
	case o.AfterDead == HoldGroup && o.Ordering == None:
		p.add(field("AfterDead"), "is HoldGroup although Ordering is None; it must be Continue, for no message holds another")
	}
}

func (o *Outbox) checkBatch(p *problems, field func(string) string) {
	if o.BatchSize < 0 || o.BatchSize > maxBatchSize {
		p.add(field("BatchSize"), "is %d; it must be from 1 to %d, or 0 for the default", o.BatchSize, maxBatchSize)
	}
	if o.MaxBatchBytes < 0 {
		p.add(field("MaxBatchBytes"), "is %d; it must be positive, or 0 for the default", o.MaxBatchBytes)
	}
	if d := o.DeliverTimeout; d < 0 || d > maxDeliverTimeout {
		p.add(field("DeliverTimeout"), "is %v; it must be positive and at most %v, or 0 for the default", d, maxDeliverTimeout)
	}
}

func (o *Outbox) checkRetry(p *problems, field func(string) string) {
	if o.Backoff != nil {
		if err := backoff.Validate(o.Backoff); err != nil {
			p.add(field("Backoff"), "is not valid: %w", err)
		}
	}
	if o.MaxAttempts < 0 {
		p.add(field("MaxAttempts"), "is %d; it must be positive, or 0 for no bound", o.MaxAttempts)
	}
	if o.GiveUpAfter < 0 {
		p.add(field("GiveUpAfter"), "is %v; it must be positive, or 0 for no bound", o.GiveUpAfter)
	}
	if o.DeadRetention < 0 {
		p.add(field("DeadRetention"), "is %v; it must be positive, or 0 for ever", o.DeadRetention)
	}
}

// checkTables looks at the names of all tables, and that none is the one that
// another keeps its own facts in.
func (c *Config) checkTables(p *problems) {
	c2 := c.withDefaults()
	check := func(field string, name tables.Name) {
		if err := name.Validate(); err != nil {
			p.add(field, "is not valid: %w", err)
			return
		}
		for _, o := range c2.Outboxes {
			if other := (tables.Name{Schema: c2.Schema, Table: o.Table}); other.Validate() == nil && other.MetaName() == name.Table {
				p.add(field, "is %q; it must not be the table that belongs to %q", name.Table, o.Table)
			}
		}
	}
	check("Table", tables.Name{Schema: c2.Schema, Table: c2.Table})
	for i, o := range c.Outboxes {
		if o.Table != "" {
			check(fmt.Sprintf("Outboxes[%d] (%q).Table", i, excerpt(o.Name)), tables.Name{Schema: c2.Schema, Table: o.Table})
		}
	}
}

func (c *Config) names() []string {
	names := make([]string, len(c.Outboxes))
	for i, o := range c.Outboxes {
		names[i] = o.Name
	}
	return names
}

// problems gathers what is wrong with a Config.
type problems struct{ errs []error }

func (p *problems) add(field, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("outbox: Config."+strings.ReplaceAll(field, "%", "%%")+" "+format, args...))
}

func (p *problems) checkName(field, name string) {
	switch {
	case name == "":
		p.add(field, "is empty; it must not be")
	case len(name) > maxNameBytes:
		p.add(field, "has %d bytes; it must have at most %d", len(name), maxNameBytes)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		p.add(field, "is %q; it must be valid UTF-8 without control characters", name)
	}
}

// quoted lists names in an error.
func quoted(names []string) string {
	list := make([]string, len(names))
	for i, n := range names {
		list[i] = fmt.Sprintf("%q", excerpt(n))
	}
	return strings.Join(list, ", ")
}

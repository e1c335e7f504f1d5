package dialect

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
)

// Bounds of what Stats counts and lists. A number that has reached its bound
// says "or more".
const (
	// MaxCounted bounds each number of messages of a lane.
	MaxCounted = 10_000
	// MaxBlockedCounted bounds the number of blocked groups of a lane.
	MaxBlockedCounted = 1000
	// MaxBlockedListed bounds the list of blocked groups of an outbox.
	MaxBlockedListed = 100
)

// maxLookedAt is the number of messages at the head of a lane among which Stats
// looks for one that could be delivered.
const maxLookedAt = 100

// OutboxStats is the state of an outbox.
type OutboxStats struct {
	Outbox string `json:"outbox"`
	Table  string `json:"table"`
	// Partitions is the count in force, Superseded what it was before, oldest
	// first. Configured is that of this instance; 0: as recorded.
	Partitions int    `json:"partitions"`
	Superseded []int  `json:"superseded,omitempty"`
	Configured int    `json:"configured,omitempty"`
	Ordering   string `json:"ordering"`
	// PausedAt is when it was paused; zero: it is not.
	PausedAt time.Time `json:"paused_at,omitzero"`

	Counts
	// Unattended is the greatest of the lanes'.
	Unattended time.Duration `json:"unattended,omitempty"`
	// Lanes are the partitions in force, and those of other counts that still
	// hold messages, in the order of count and number.
	Lanes []LaneStats `json:"lanes"`
	// Blocked lists the heads of blocked groups, by lane and id, at most
	// MaxBlockedListed.
	Blocked []BlockedGroup `json:"blocked,omitempty"`
}

// Counts are the numbers of messages of a lane, each at most MaxCounted, or
// their sums over the lanes of an outbox.
type Counts struct {
	// Due is the number of pending messages that are due, blocked or not.
	Due int `json:"due"`
	// Waiting is the number of pending messages that become due later: retries
	// and delayed ones.
	Waiting int `json:"waiting"`
	Dead    int `json:"dead"`
	// BlockedGroups is the number of groups that a failed message holds, and
	// with HoldGroup a dead one; at most MaxBlockedCounted in a lane.
	BlockedGroups int `json:"blocked_groups"`
	// OldestDue is since when the oldest due message could have been
	// delivered, were it not blocked; zero: none is due.
	OldestDue time.Time `json:"oldest_due,omitzero"`
}

// Pending is the number of pending messages: those due and those waiting.
func (c Counts) Pending() int { return c.Due + c.Waiting }

func (c *Counts) add(other Counts) {
	c.Due += other.Due
	c.Waiting += other.Waiting
	c.Dead += other.Dead
	c.BlockedGroups += other.BlockedGroups
	if c.OldestDue.IsZero() || !other.OldestDue.IsZero() && other.OldestDue.Before(c.OldestDue) {
		c.OldestDue = other.OldestDue
	}
}

// LaneStats is the state of a partition.
type LaneStats struct {
	Partition int `json:"partition"`
	// Partitions is the count that the lane belongs to. If it is not the one
	// in force, the lane's messages are still to be moved.
	Partitions int `json:"partitions"`
	Counts
	// Unattended is how long the oldest message that nothing blocks has been
	// due, while nobody is seen to own the lane and the outbox is not paused.
	// A lane that waits for its turn may show a little; one that shows minutes
	// has no worker. On SQLite only workers of this process are seen.
	Unattended time.Duration `json:"unattended,omitempty"`
	// Owner is who delivers at the moment; nil: nobody, or somebody between
	// two batches. On SQLite always nil.
	Owner *Owner `json:"owner,omitempty"`
	// Local is the state of this process's worker; nil: there is none.
	Local *LocalState `json:"local,omitempty"`

	deliverable time.Time // since when; zero: nothing is
}

// Owner is a database session that owns a lane. What the database does not
// show to this role is empty.
type Owner struct {
	PID         int    `json:"pid"`
	Application string `json:"application,omitempty"`
	Client      string `json:"client,omitempty"`
}

// LocalState is what this process's worker of a lane knows.
type LocalState struct {
	// Owning: it owns the lane at the moment.
	Owning bool `json:"owning"`
	// Stuck: a relay call that ignored the end of its context still runs.
	Stuck bool `json:"stuck,omitempty"`
	// Outage is why the destination counts as unavailable, and Since since
	// when; both are zero if it does not.
	Outage string    `json:"outage,omitempty"`
	Since  time.Time `json:"since,omitzero"`
}

// BlockedGroup is a group that does not go on, by its head.
type BlockedGroup struct {
	GroupKey  string `json:"group_key,omitempty"`
	ID        int64  `json:"id"`
	Partition int    `json:"partition"`
	Attempts  int    `json:"attempts"`
	LastError string `json:"last_error"`
	// NextRetry is when the head is tried again; zero: it is dead.
	NextRetry time.Time `json:"next_retry,omitzero"`
}

// FoundOutbox is an outbox that has messages in a table although it is not
// configured to be there.
type FoundOutbox struct {
	Outbox string `json:"outbox"`
	Table  string `json:"table"`
	Counts
}

// OutboxQuery is what Stats must know of an outbox.
type OutboxQuery struct {
	Name     string
	Ordering engine.Ordering
	HoldDead bool
}

// Report is what Stats found.
type Report struct {
	// At is when, by the clock that all its instants are of.
	At time.Time
	// Outboxes are those asked for, in their order.
	Outboxes []OutboxStats
	// Found are outboxes that have undelivered messages in one of the tables
	// although they are not configured to be there.
	Found []FoundOutbox
}

// Stats describes the given outboxes. Its cost depends on the number of lanes,
// not on that of messages: it counts up to MaxCounted.
func (a *Admin) Stats(ctx context.Context, outboxes []OutboxQuery) (Report, error) {
	var report Report
	err := a.syntax.read(ctx, true, func(tx engine.Tx) (err error) {
		look := look{Admin: a, ctx: ctx, tx: tx}
		report, err = look.report(outboxes)
		return err
	})
	if err != nil {
		return Report{}, fmt.Errorf("read stats: %w", err)
	}
	return report, nil
}

// look is one look at all tables.
type look struct {
	*Admin
	ctx context.Context
	tx  engine.Tx
}

func (l look) report(outboxes []OutboxQuery) (r Report, err error) {
	if r.At, err = l.clock(); err != nil {
		return r, err
	}
	known := make(map[tables.Name]map[string]recorded)
	names, byTable := l.byTable()
	for _, name := range names {
		if known[name], err = l.recorded(l.ctx, l.tx, name); err != nil {
			return r, err
		}
	}
	for _, q := range outboxes {
		name, err := l.table(q.Name)
		if err != nil {
			return r, err
		}
		o, err := l.outbox(name, q, known[name][q.Name])
		if err != nil {
			return r, fmt.Errorf("outbox %q: %w", q.Name, err)
		}
		r.Outboxes = append(r.Outboxes, o)
	}
	if err := l.attend(r, byTable); err != nil {
		return r, err
	}
	r.Found, err = l.found(names)
	return r, err
}

func (l look) clock() (time.Time, error) {
	var now sql.NullInt64
	s := l.statement(tables.Name{})
	s.add("SELECT " + l.syntax.micros(l.syntax.now()))
	err := s.query(l.ctx, l.tx, func(rows *sql.Rows) error { return rows.Scan(&now) })
	return microTime(now), err
}

func (l look) outbox(name tables.Name, q OutboxQuery, r recorded) (OutboxStats, error) {
	o := OutboxStats{
		Outbox: q.Name, Table: name.Table,
		Partitions: max(r.partitions, 1), Superseded: r.superseded,
		Ordering: q.Ordering.String(), PausedAt: r.pausedAt,
	}
	lanes, err := l.lanes(name, q)
	if err != nil {
		return o, err
	}
	o.Lanes = withEmpty(lanes, o.Partitions)
	for _, lane := range lanes {
		o.add(lane.Counts)
	}
	if o.BlockedGroups > 0 {
		o.Blocked, err = l.blocked(name, q)
	}
	return o, err
}

// attend fills in who owns the lanes and, for those that nobody does, since
// when something could have been delivered.
func (l look) attend(r Report, byTable map[tables.Name][]string) error {
	owners := make(map[laneKey]Owner)
	for name, outboxes := range byTable {
		found, err := l.syntax.owners(l.ctx, l.tx, name, outboxes)
		if err != nil {
			return fmt.Errorf("owners: %w", err)
		}
		maps.Copy(owners, found)
	}
	for i := range r.Outboxes {
		r.Outboxes[i].attend(owners, r.At)
	}
	return nil
}

func (o *OutboxStats) attend(owners map[laneKey]Owner, now time.Time) {
	for i := range o.Lanes {
		lane := &o.Lanes[i]
		if owner, ok := owners[laneKey{o.Outbox, lane.Partition}]; ok {
			lane.Owner = &owner
		} else if o.PausedAt.IsZero() && !lane.deliverable.IsZero() {
			lane.Unattended = max(now.Sub(lane.deliverable), 0)
		}
		o.Unattended = max(o.Unattended, lane.Unattended)
	}
}

// withEmpty adds the lanes in force that hold no messages.
func withEmpty(lanes []LaneStats, partitions int) []LaneStats {
	found := make(map[int]bool)
	for _, lane := range lanes {
		if lane.Partitions == partitions {
			found[lane.Partition] = true
		}
	}
	all := slices.Clone(lanes)
	for p := range partitions {
		if !found[p] {
			all = append(all, LaneStats{Partition: p, Partitions: partitions})
		}
	}
	slices.SortFunc(all, func(a, b LaneStats) int {
		return cmp.Or(cmp.Compare(a.Partitions, b.Partitions), cmp.Compare(a.Partition, b.Partition))
	})
	return all
}

// found looks for outboxes that are not configured.
func (l look) found(names []tables.Name) ([]FoundOutbox, error) {
	var found []FoundOutbox
	for _, name := range names {
		outboxes, err := l.outboxesIn(name)
		if err != nil {
			return nil, fmt.Errorf("look for outboxes in %s: %w", name.Messages(), err)
		}
		for _, outbox := range outboxes {
			if l.outboxes[outbox] == name {
				continue
			}
			lanes, err := l.lanes(name, OutboxQuery{Name: outbox, Ordering: engine.None})
			if err != nil {
				return nil, fmt.Errorf("outbox %q in %s: %w", outbox, name.Messages(), err)
			}
			f := FoundOutbox{Outbox: outbox, Table: name.Table}
			for _, lane := range lanes {
				f.add(lane.Counts)
			}
			found = append(found, f)
		}
	}
	return found, nil
}

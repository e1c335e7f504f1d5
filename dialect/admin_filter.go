package dialect

import (
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Status is what has become of a message.
type Status string

// The statuses of a message that is in its table.
const (
	// Pending: to be delivered, now or when it is due.
	Pending Status = "pending"
	// Delivered: kept after its delivery, by Retention Keep.
	Delivered Status = "delivered"
	// Dead: given up, until an operator retries it.
	Dead Status = "dead"
)

// Filter selects messages of an outbox. A message must meet every condition
// that is set; the zero Filter meets all.
type Filter struct {
	Status   Status
	GroupKey string
	Type     string
	// AfterID and BeforeID bound the id; both are exclusive, 0 is no bound.
	AfterID, BeforeID int64
	// OlderThan selects messages that were added longer ago.
	OlderThan time.Duration
	// ErrorContains is a part of the last error, case-sensitive.
	ErrorContains string
	// MinAttempts selects messages with at least so many charged attempts.
	MinAttempts int
}

func (f Filter) validate() error {
	switch f.Status {
	case "", Pending, Delivered, Dead:
	default:
		return fmt.Errorf("filter: Status is %q; it must be %q, %q, %q or empty", f.Status, Pending, Delivered, Dead)
	}
	for field, text := range map[string]string{"GroupKey": f.GroupKey, "Type": f.Type, "ErrorContains": f.ErrorContains} {
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			return fmt.Errorf("filter: %s is not valid UTF-8 without NUL", field)
		}
	}
	switch {
	case f.AfterID < 0 || f.BeforeID < 0:
		return fmt.Errorf("filter: AfterID is %d and BeforeID is %d; they must not be negative", f.AfterID, f.BeforeID)
	case f.OlderThan < 0:
		return fmt.Errorf("filter: OlderThan is %v; it must not be negative", f.OlderThan)
	case f.MinAttempts < 0:
		return fmt.Errorf("filter: MinAttempts is %d; it must not be negative", f.MinAttempts)
	}
	return nil
}

// errEmptyFilter keeps a forgotten condition from changing a whole outbox.
var errEmptyFilter = errors.New("filter is empty; set a condition, such as Status, to say which messages are meant")

// condition adds the filter, except its status, as SQL that follows others.
func (f Filter) condition(s *statement) string {
	var b strings.Builder
	and := func(format string, a ...any) { fmt.Fprintf(&b, " AND "+format, a...) }
	if f.GroupKey != "" {
		and("group_key = %s", s.arg(f.GroupKey))
	}
	if f.Type != "" {
		and("type = %s", s.arg(f.Type))
	}
	if f.AfterID > 0 {
		and("id > %s", s.arg(f.AfterID))
	}
	if f.BeforeID > 0 {
		and("id < %s", s.arg(f.BeforeID))
	}
	if f.OlderThan > 0 {
		and("inserted_at < %s", s.syntax.ago(f.OlderThan))
	}
	if f.ErrorContains != "" {
		and("%s", s.syntax.contains("last_error", s.arg(f.ErrorContains)))
	}
	if f.MinAttempts > 0 {
		and("attempts >= %s", s.arg(f.MinAttempts))
	}
	return b.String()
}

// source is a condition that one of the table's partial indexes covers. Every
// message meets exactly one of ready, scheduled, delivered and dead, so that a
// query that asks for each of them apart never needs to read the whole table.
type source string

const (
	sourceReady     source = "status = 'pending' AND scheduled_at IS NULL"
	sourceScheduled source = "status = 'pending' AND scheduled_at IS NOT NULL"
	sourceFailed    source = "status = 'pending' AND attempts > 0"
	sourceDelivered source = "status = 'delivered'"
	sourceDead      source = "status = 'dead'"
)

var allSources = []source{sourceReady, sourceScheduled, sourceFailed, sourceDelivered, sourceDead}

// table stands in a statement for the messages by the source's index.
func (s source) table() string { return "{messages" + s.index() + "}" }

// index is the suffix of the index that covers the source.
func (s source) index() string {
	switch s {
	case sourceReady:
		return "_ready"
	case sourceScheduled:
		return "_due"
	case sourceFailed:
		return "_failed"
	case sourceDelivered:
		return "_delivered"
	}
	return "_dead"
}

// sources covers the messages of a status, or of all.
func (s Status) sources() []source {
	switch s {
	case Pending:
		return []source{sourceReady, sourceScheduled}
	case Delivered:
		return []source{sourceDelivered}
	case Dead:
		return []source{sourceDead}
	}
	return []source{sourceReady, sourceScheduled, sourceDelivered, sourceDead}
}

// selectIDs adds a query of the ids of up to limit messages of an outbox that are
// in one of the sources and meet the condition, in their order.
func (s *statement) selectIDs(sources []source, condition string, descending bool, limit int) {
	order := fmt.Sprintf("%s LIMIT %d", orderByID(descending), limit)
	for i, source := range sources {
		if i > 0 {
			s.add("\nUNION ALL ")
		}
		s.addf("SELECT * FROM (SELECT id FROM {messages} WHERE %s AND %s %s) AS s%d", source, condition, order, i)
	}
	s.add("\n" + order)
}

func orderByID(descending bool) string {
	if descending {
		return "ORDER BY id DESC"
	}
	return "ORDER BY id"
}

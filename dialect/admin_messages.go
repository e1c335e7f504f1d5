package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// Bounds of MessageQuery.Limit.
const (
	DefaultPageLimit = 100
	MaxPageLimit     = 1000
)

// MessageQuery asks for a page of an outbox's messages.
type MessageQuery struct {
	Outbox string
	Filter Filter
	// After is where the page begins: the Next of the page before it. 0: at
	// the beginning.
	After int64
	// Limit is the number of messages, from 1 to MaxPageLimit. Defaults to
	// DefaultPageLimit.
	Limit int
	// Payload asks for the payloads too.
	Payload bool
	// Descending gives the youngest messages first.
	Descending bool
}

// MessageInfo is a message as it is stored.
type MessageInfo struct {
	ID     int64  `json:"id"`
	Outbox string `json:"outbox"`
	// Partition is the lane, among the Partitions that were in force when the
	// message was added or last moved.
	Partition  int               `json:"partition"`
	Partitions int               `json:"partitions"`
	GroupKey   string            `json:"group_key,omitempty"`
	Type       string            `json:"type"`
	Headers    map[string]string `json:"headers,omitempty"`
	// Payload is nil unless it was asked for; PayloadBytes is its length in
	// any case.
	Payload      []byte `json:"payload,omitempty"`
	PayloadBytes int    `json:"payload_bytes"`
	Status       Status `json:"status"`
	// Attempts counts the charged attempts. LastError is that of the last one,
	// and stays when the message is retried.
	Attempts   int       `json:"attempts"`
	LastError  string    `json:"last_error,omitempty"`
	InsertedAt time.Time `json:"inserted_at"`
	// ScheduledAt is when a pending message is or was due; zero: at once. A
	// dead message that was retried has the beginning of 1970 until it is
	// delivered or fails again.
	ScheduledAt time.Time `json:"scheduled_at,omitzero"`
	DeliveredAt time.Time `json:"delivered_at,omitzero"`
	DeadAt      time.Time `json:"dead_at,omitzero"`
}

// MessagePage is a page of messages in the order of their ids.
type MessagePage struct {
	Messages []MessageInfo `json:"messages"`
	// Next is the After of the next page; 0: this is the last one.
	Next int64 `json:"next,omitempty"`
}

// Messages gives a page. Paging goes by id, so that messages which come or go
// between two pages make none appear twice or be left out.
//
// It reads through the partial index of each status, so its cost depends on
// the messages of the outbox that have the filter's status, and with the other
// conditions on how many messages it must look at to find a page of them.
func (a *Admin) Messages(ctx context.Context, q MessageQuery) (MessagePage, error) {
	name, err := a.table(q.Outbox)
	if err != nil {
		return MessagePage{}, err
	}
	if q.Limit == 0 {
		q.Limit = DefaultPageLimit
	}
	if err := q.validate(); err != nil {
		return MessagePage{}, err
	}
	var page MessagePage
	s := q.statement(a.statement(name))
	err = a.syntax.read(ctx, false, func(tx engine.Tx) error {
		page.Messages = nil
		return s.query(ctx, tx, func(rows *sql.Rows) error {
			m, err := scanMessage(rows, q.Payload)
			m.Outbox = q.Outbox
			page.Messages = append(page.Messages, m)
			return err
		})
	})
	if err != nil {
		return MessagePage{}, fmt.Errorf("read messages of %q: %w", q.Outbox, err)
	}
	if len(page.Messages) > q.Limit {
		page.Messages = page.Messages[:q.Limit]
		page.Next = page.Messages[q.Limit-1].ID
	}
	return page, nil
}

func (q *MessageQuery) validate() error {
	switch {
	case q.Limit < 1 || q.Limit > MaxPageLimit:
		return fmt.Errorf("query: Limit is %d; it must be from 1 to %d, or 0 for %d", q.Limit, MaxPageLimit, DefaultPageLimit)
	case q.After < 0:
		return fmt.Errorf("query: After is %d; it must not be negative", q.After)
	}
	return q.Filter.validate()
}

// statement completes s. It reads nothing but ids until it knows the page.
func (q *MessageQuery) statement(s *statement) *statement {
	condition := "outbox = " + s.arg(q.Outbox) + q.Filter.condition(s)
	switch {
	case q.After > 0 && q.Descending:
		condition += " AND id < " + s.arg(q.After)
	case q.After > 0:
		condition += " AND id > " + s.arg(q.After)
	}
	s.add("SELECT " + messageColumns(s.syntax, q.Payload) + " FROM {messages} WHERE id IN (SELECT id FROM (")
	s.selectIDs(q.Filter.Status.sources(), condition, q.Descending, q.Limit+1)
	s.add(") AS page) " + orderByID(q.Descending))
	return s
}

func messageColumns(syntax adminSyntax, payload bool) string {
	columns := fmt.Sprintf(`id, partition, partitions, group_key, type, CAST(headers AS text), status, attempts, last_error,
	%s, %s, %s, %s, %s`,
		syntax.micros("inserted_at"), syntax.micros("scheduled_at"), syntax.micros("delivered_at"), syntax.micros("dead_at"), syntax.size("payload"))
	if payload {
		columns += ", payload"
	}
	return columns
}

func scanMessage(rows *sql.Rows, payload bool) (MessageInfo, error) {
	var (
		m                                    MessageInfo
		group, lastError                     sql.NullString
		headers                              string
		inserted, scheduled, delivered, dead sql.NullInt64
	)
	into := []any{
		&m.ID, &m.Partition, &m.Partitions, &group, &m.Type, &headers, &m.Status, &m.Attempts, &lastError,
		&inserted, &scheduled, &delivered, &dead, &m.PayloadBytes,
	}
	if payload {
		into = append(into, &m.Payload)
	}
	if err := rows.Scan(into...); err != nil {
		return m, err
	}
	m.GroupKey, m.LastError = group.String, lastError.String
	m.InsertedAt, m.ScheduledAt = microTime(inserted), microTime(scheduled)
	m.DeliveredAt, m.DeadAt = microTime(delivered), microTime(dead)
	var err error
	m.Headers, err = decodeHeaders(headers)
	return m, err
}

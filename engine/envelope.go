package engine

import (
	"strconv"
	"time"
)

// Envelope is a stored message on its way to a relay. A relay reads it and
// leaves it as it is: Payload and Headers are shared by every redelivery that
// this process makes.
type Envelope struct {
	// ID is the message's identity within its table and its place in the
	// order of its group. It is never given to another message of the table.
	ID int64 `json:"id"`
	// Installation names the table the message lives in, wherever the table
	// is: a random text drawn when the table was created. See DedupID.
	Installation string `json:"installation"`
	// Outbox is the name of the outbox the message was added to.
	Outbox string `json:"outbox"`
	// Partition is the delivery lane, from 0 to the outbox's partitions - 1.
	Partition int `json:"partition"`
	// GroupKey is the ordering group; empty means that the message has none.
	GroupKey string `json:"group_key,omitempty"`
	// Type says what the message is, such as "order.placed".
	Type string `json:"type"`
	// Payload is what the publisher gave, byte for byte. It may be empty.
	Payload []byte `json:"payload"`
	// Headers is what the publisher and the BeforeAdd hook gave; nil if empty.
	Headers map[string]string `json:"headers,omitempty"`
	// Attempts counts the deliveries that were charged to this message before
	// this one: 0 at the first. An outage or an interruption charges nothing.
	Attempts int `json:"attempts"`
	// LastError is the error of the last charged attempt, at most
	// MaxErrorBytes long.
	LastError string `json:"last_error,omitempty"`
	// ScheduledAt is when this delivery is or was due: the publisher's
	// DeliverAt, or the next retry. For a message to be delivered at once it is
	// InsertedAt; for a dead one that an operator retried, the year 1970.
	ScheduledAt time.Time `json:"scheduled_at"`
	// DueAt is since when the message should have been delivered: when it was
	// added, or the publisher's DeliverAt, or when an operator retried it after
	// its death. GiveUpAfter counts from it.
	DueAt time.Time `json:"due_at"`
	// InsertedAt is when the message was added, by the database's clock.
	InsertedAt time.Time `json:"inserted_at"`
}

// DedupID identifies the message to a consumer that has to drop duplicates:
// <installation>-<outbox>-<id>. No two messages share it, whatever table,
// service or outbox they come from, and it is the same on every redelivery.
// A copy of the database (a restored backup, a promoted standby that had not
// received everything) goes on with the same installation, so ids drawn after
// the point of the copy may come twice: once from each side.
func (e Envelope) DedupID() string {
	return e.Installation + "-" + e.Outbox + "-" + strconv.FormatInt(e.ID, 10)
}

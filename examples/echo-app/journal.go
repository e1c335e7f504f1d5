package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gormoutbox/outbox"
)

// maxEntries bounds what a Journal remembers.
const maxEntries = 100

// Entry is what a Journal knows of a message: nothing but the delivery, where
// the commit was another process's or before this one started.
type Entry struct {
	OrderID     int64             `json:"order_id"`
	DedupID     string            `json:"dedup_id,omitempty"`
	Outbox      string            `json:"outbox,omitempty"`
	Type        string            `json:"type"`
	GroupKey    string            `json:"group_key,omitempty"`
	Payload     json.RawMessage   `json:"payload,omitempty"`
	Headers     map[string]string `json:"headers,omitempty"`
	Attempts    int               `json:"attempts"`
	InsertedAt  time.Time         `json:"inserted_at,omitzero"`
	CommittedAt time.Time         `json:"committed_at,omitzero"`
	DeliveredAt time.Time         `json:"delivered_at,omitzero"`
	// LatencyMS is from the commit to the delivery.
	LatencyMS *float64 `json:"latency_ms,omitempty"`

	change int // of the journal, by which this was last changed
}

// Journal is the subscriber of this example: it stands where a broker or another
// service would, and remembers the last messages for whoever watches.
type Journal struct {
	mu      sync.Mutex
	entries []Entry       // the last changed comes last
	change  int           // how often anything has changed
	changed chan struct{} // closed at the next change
}

// NewJournal makes an empty journal.
func NewJournal() *Journal { return &Journal{changed: make(chan struct{})} }

// Deliver takes a message; the relay calls it. It is at least once that a
// message comes, so that the same DedupID may come again and changes nothing.
func (j *Journal) Deliver(_ context.Context, env outbox.Envelope) error {
	var body struct {
		OrderID int64 `json:"order_id"`
	}
	if err := json.Unmarshal(env.Payload, &body); err != nil {
		return outbox.Permanent(fmt.Errorf("decode %s: %w", env.DedupID(), err))
	}
	now := time.Now().UTC()
	j.update(body.OrderID, env.Type, func(e *Entry) {
		if e.DedupID == env.DedupID() {
			return
		}
		e.DedupID, e.Outbox, e.GroupKey = env.DedupID(), env.Outbox, env.GroupKey
		e.Payload = slices.Clone(env.Payload) // the relay only lends it
		e.Headers, e.Attempts = env.Headers, env.Attempts
		e.InsertedAt, e.DeliveredAt = env.InsertedAt.UTC(), now
	})
	return nil
}

// Committed notes that an order's event of the given type has just been
// committed.
func (j *Journal) Committed(orderID int64, typ string) {
	now := time.Now().UTC()
	j.update(orderID, typ, func(e *Entry) { e.CommittedAt = now })
}

// Since gives the entries that have changed after the given change, in the
// order of their changes, the number of the last change, and a channel that is
// closed at the next one.
func (j *Journal) Since(change int) ([]Entry, int, <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	first := len(j.entries)
	for first > 0 && j.entries[first-1].change > change {
		first--
	}
	return slices.Clone(j.entries[first:]), j.change, j.changed
}

func (j *Journal) update(orderID int64, typ string, set func(*Entry)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	entry := Entry{OrderID: orderID, Type: typ}
	known := func(e Entry) bool { return e.OrderID == orderID && e.Type == typ }
	if i := slices.IndexFunc(j.entries, known); i >= 0 {
		entry = j.entries[i]
		j.entries = slices.Delete(j.entries, i, i+1)
	}
	set(&entry)
	if !entry.CommittedAt.IsZero() && !entry.DeliveredAt.IsZero() {
		ms := float64(entry.DeliveredAt.Sub(entry.CommittedAt).Microseconds()) / 1000
		entry.LatencyMS = &ms
	}
	j.change++
	entry.change = j.change
	j.entries = append(j.entries, entry)
	j.entries = j.entries[max(0, len(j.entries)-maxEntries):]
	close(j.changed)
	j.changed = make(chan struct{})
}

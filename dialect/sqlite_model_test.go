package dialect_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/outboxtest/storagetest"
)

// TestSQLiteModel lets random publishers, workers, operators and clocks at a
// storage and compares it with a model that keeps its messages in a map: no
// message is lost, none comes that is blocked or not due, and none before its
// turn in its group.
func TestSQLiteModel(t *testing.T) {
	t.Parallel()
	db := openDSN(t, ":memory:")
	db.SetMaxOpenConns(1)
	clock := new(time.Time)
	l := openLite(t, db, func() time.Time { return *clock })
	rapid.Check(t, func(rt *rapid.T) {
		l.exec(t, "DELETE FROM "+liteNames[storagetest.Orders].Messages())
		l.setPartitions(t, storagetest.Orders, 1)
		*clock = time.Unix(1_700_000_000, 0)
		m := &model{T: t, rt: rt, l: l, clock: clock, partitions: 1, messages: make(map[int64]*modelMessage)}
		rt.Repeat(map[string]func(*rapid.T){
			"add":       m.add,
			"roll back": m.rollBack,
			"deliver":   m.deliver,
			"wait":      m.wait,
			"revive":    m.revive,
			"split":     m.repartition,
		})
		m.drain()
	})
}

// modelMessage is a pending or dead message.
type modelMessage struct {
	id       int64
	group    string
	inserted time.Time
	due      time.Time // zero: at once
	attempts int
	dead     bool
}

func (m *modelMessage) urgent() bool { return m.attempts > 0 || m.due.Equal(time.UnixMicro(0)) }

// turn is the time from which the message counts in its group.
func (m *modelMessage) turn() time.Time {
	if m.due.IsZero() {
		return m.inserted
	}
	return m.due
}

// before tells whether a must be delivered before b, which is of its group.
func (m *modelMessage) before(b *modelMessage) bool {
	switch {
	case m.urgent() || b.urgent():
		return m.urgent() && !b.urgent()
	case m.due.IsZero() && b.due.IsZero():
		return m.id < b.id
	}
	return m.turn().Before(b.turn())
}

type model struct {
	*testing.T
	rt         *rapid.T
	l          *liteDB
	clock      *time.Time
	partitions int
	messages   map[int64]*modelMessage
}

func (m *model) rows(t *rapid.T) (rows []engine.Row) {
	for range rapid.IntRange(1, 3).Draw(t, "rows") {
		row := liteRow(rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "group"), "t")
		row.Delay = rapid.SampledFrom([]time.Duration{0, 0, 0, 5 * time.Second}).Draw(t, "delay")
		row.Payload = make([]byte, 10)
		rows = append(rows, row)
	}
	return rows
}

func (m *model) add(t *rapid.T) {
	tx := m.l.begin(m.T)
	stored, err := m.l.storage.Insert(m.Context(), tx, m.rows(t), true)
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range stored {
		message := &modelMessage{id: e.ID, group: e.GroupKey, inserted: e.InsertedAt}
		if !e.ScheduledAt.Equal(e.InsertedAt) {
			message.due = e.ScheduledAt
		}
		m.messages[e.ID] = message
	}
	*m.clock = m.clock.Add(time.Microsecond)
}

func (m *model) rollBack(t *rapid.T) {
	tx := m.l.begin(m.T)
	if _, err := m.l.storage.Insert(m.Context(), tx, m.rows(t), false); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
}

func (m *model) wait(t *rapid.T) {
	*m.clock = m.clock.Add(time.Duration(rapid.IntRange(1, 4000).Draw(t, "milliseconds")) * time.Millisecond)
}

func (m *model) lane(t *rapid.T) engine.Lane {
	return engine.Lane{
		Outbox: storagetest.Orders, Partitions: m.partitions,
		Partition: rapid.IntRange(0, m.partitions-1).Draw(t, "partition"),
	}
}

func (m *model) deliver(t *rapid.T) {
	q := engine.Query{Limit: rapid.IntRange(1, 5).Draw(t, "limit"), MaxBytes: rapid.SampledFrom([]int{1, 25, 1000}).Draw(t, "bytes")}
	again := rapid.Bool().Draw(t, "settle again")
	var settlement engine.Settlement
	err := m.l.storage.WithPartition(m.Context(), m.lane(t), func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, q)
		if err != nil {
			return err
		}
		m.check(t, page, q)
		settlement = m.outcome(t, page.Envelopes)
		c.Settle(settlement)
		return nil
	})
	if err == nil && again {
		err = m.l.storage.Settle(m.Context(), storagetest.Orders, settlement)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// outcome draws what the relay did, records it in the model and settles it.
// After a failure in a group the rest of it is not attempted.
func (m *model) outcome(t *rapid.T, batch []engine.Envelope) (s engine.Settlement) {
	s.Keep = rapid.Bool().Draw(t, "keep")
	stopped := make(map[string]bool)
	for _, e := range batch {
		if stopped[e.GroupKey] && e.GroupKey != "" {
			continue
		}
		message := m.messages[e.ID]
		failure := engine.Failure{ID: e.ID, Attempts: e.Attempts, Error: "refused"}
		switch rapid.SampledFrom([]string{"delivered", "delivered", "delivered", "failed", "dead", "skipped"}).Draw(t, "outcome") {
		case "delivered":
			s.Delivered = append(s.Delivered, e.ID)
			delete(m.messages, e.ID)
		case "failed":
			failure.Delay = time.Duration(rapid.IntRange(0, 3).Draw(t, "delay")) * time.Second
			s.Failed = append(s.Failed, failure)
			message.attempts++
			message.due = m.clock.Add(failure.Delay)
			stopped[e.GroupKey] = true
		case "dead":
			s.Dead = append(s.Dead, failure)
			message.attempts++
			message.dead, message.due = true, time.Time{}
		case "skipped":
			stopped[e.GroupKey] = true
		}
	}
	return s
}

// check compares a page with the model.
func (m *model) check(t *rapid.T, page engine.Page, q engine.Query) {
	if page.State != engine.PageOpen {
		t.Fatalf("page state %d", page.State)
	}
	now, seen := *m.clock, make(map[int64]bool)
	for _, e := range page.Envelopes {
		message := m.messages[e.ID]
		if message == nil || message.dead || message.due.After(now) || seen[e.ID] {
			t.Fatalf("message %d came: %+v at %v", e.ID, message, now)
		}
		if e.Attempts != message.attempts || e.GroupKey != message.group {
			t.Fatalf("envelope %+v, want %+v", e, message)
		}
		for _, other := range m.messages {
			if other.dead || seen[other.id] || message.group == "" || other.group != message.group {
				continue
			}
			if other.attempts > 0 && other.due.After(now) {
				t.Fatalf("message %d came, though %d of its group waits for its retry", e.ID, other.id)
			}
			if !other.due.After(now) && other.before(message) {
				t.Fatalf("message %d came before %d", e.ID, other.id)
			}
		}
		seen[e.ID] = true
	}
	if len(page.Envelopes) > q.Limit || len(page.Envelopes) > max(1, q.MaxBytes/10) {
		t.Fatalf("%d messages came for %+v", len(page.Envelopes), q)
	}
}

func (m *model) revive(t *rapid.T) {
	for _, id := range slices.Sorted(maps.Keys(m.messages)) {
		message := m.messages[id]
		if message.dead && rapid.Bool().Draw(t, "revive") {
			m.l.instance().Revive(m.T, storagetest.Orders, id)
			message.dead, message.attempts, message.due = false, 0, time.UnixMicro(0)
		}
	}
}

func (m *model) repartition(t *rapid.T) {
	m.partitions = rapid.IntRange(1, 3).Draw(t, "partitions")
	m.l.setPartitions(m.T, storagetest.Orders, m.partitions)
	for more := true; more; {
		var err error
		_, more, err = m.l.storage.Remap(m.Context(), storagetest.Orders, 3)
		if err != nil {
			t.Fatal(err)
		}
	}
}

// drain delivers everything that is not dead.
func (m *model) drain() {
	*m.clock = m.clock.Add(time.Hour)
	for n := 1; n > 0; {
		n = 0
		for p := range m.partitions {
			lane := engine.Lane{Outbox: storagetest.Orders, Partition: p, Partitions: m.partitions}
			err := m.l.storage.WithPartition(m.Context(), lane, func(ctx context.Context, c engine.Claim) error {
				q := engine.Query{Limit: 3, MaxBytes: 1000}
				page, err := c.Fetch(ctx, q)
				m.check(m.rt, page, q)
				var s engine.Settlement
				for _, e := range page.Envelopes {
					s.Delivered = append(s.Delivered, e.ID)
					delete(m.messages, e.ID)
				}
				n += len(s.Delivered)
				c.Settle(s)
				return err
			})
			if err != nil {
				m.rt.Fatal(err)
			}
		}
	}
	for id, message := range m.messages {
		if !message.dead {
			m.rt.Fatal(fmt.Sprintf("message %d was never delivered: %+v", id, message))
		}
	}
}

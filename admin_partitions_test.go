package outbox_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestRepartitionRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	c := one(func(o *outbox.Outbox) { o.Ordering = outbox.Total })
	c.Outboxes = append(c.Outboxes, outbox.Outbox{Name: "grouped"})
	c.DefaultOutbox = "grouped"
	in := setUp(t, db, c)
	for name, counts := range map[string][]int{"orders": {0, 2}, "grouped": {-1, 0, 10_001}} {
		for _, n := range counts {
			if err := in.Repartition(t.Context(), name, n); err == nil {
				t.Errorf("Repartition of %s takes %d", name, n)
			}
		}
	}
	if err := in.Repartition(t.Context(), "orders", 1); err != nil {
		t.Error(err)
	}
}

// C56: the count changes with a backlog, without workers. Nothing is left in
// the old lanes, and order holds.
func TestRepartitionMovesTheBacklog(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		const n, groups = 2500, 40
		db := open()
		c, r := relayed(func(o *outbox.Outbox) { o.Partitions = 4 })
		in := setUp(t, db, c)
		events := make([]outbox.Event, n)
		for i := range events {
			events[i] = grouped(fmt.Sprint(i), fmt.Sprint(i%groups))
		}
		publish(t, db, events...)
		first := listed(t, in, outbox.Query{})[:50]
		for _, m := range first {
			if _, err := in.MarkDead(t.Context(), "orders", m.ID); err != nil {
				t.Fatal(err)
			}
		}
		for _, count := range []int{16, 4, 7} {
			if err := in.Repartition(t.Context(), "orders", count); err != nil {
				t.Fatal(err)
			}
			s := mustStats(t, in)
			if s.Partitions != count || len(s.Lanes) != count || s.Due != n-len(first) || s.Dead != len(first) {
				t.Errorf("after %d: %d partitions, %d lanes, %d due, %d dead", count, s.Partitions, len(s.Lanes), s.Due, s.Dead)
			}
		}
		if s := mustStats(t, in); !slices.Equal(s.Superseded, []int{16, 4}) || s.Configured != 4 {
			t.Errorf("superseded are %v, configured is %d", s.Superseded, s.Configured)
		}
		if retried, err := in.RetryDeadWhere(t.Context(), "orders", outbox.Filter{Status: outbox.Dead}); retried != len(first) || err != nil {
			t.Fatalf("retried %d, %v", retried, err)
		}
		drain(t, in)
		wantInOrder(t, r.all(), n)
	})
}

// wantInOrder checks that n messages came once each, each group by id.
func wantInOrder(t testing.TB, delivered []outbox.Envelope, n int) {
	t.Helper()
	last := make(map[string]int64)
	for _, e := range delivered {
		if e.ID <= last[e.GroupKey] {
			t.Errorf("message %d of group %s comes after %d", e.ID, e.GroupKey, last[e.GroupKey])
		}
		last[e.GroupKey] = e.ID
	}
	if len(delivered) != n {
		t.Errorf("%d messages delivered, want %d", len(delivered), n)
	}
}

// C56: the count changes again and again while publishers publish and workers
// deliver.
func TestRepartitionWhileRelaying(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		const rounds, groups = 60, 12
		db := open()
		c, r := relayed(func(o *outbox.Outbox) { o.Partitions, o.BatchSize = 2, 5 })
		c.PollInterval = 50 * time.Millisecond
		in := setUp(t, db, c)
		start(t, in)
		var publishers sync.WaitGroup
		publishers.Go(func() {
			for i := range rounds {
				var events []outbox.Event
				for g := range groups {
					events = append(events, grouped(fmt.Sprint(i), fmt.Sprint(g)))
				}
				if err := db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, events...) }); err != nil {
					t.Error(err)
				}
			}
		})
		for _, n := range []int{5, 3, 8, 2} {
			if err := in.Repartition(t.Context(), "orders", n); err != nil {
				t.Error(err)
			}
		}
		publishers.Wait()
		r.wait(t, rounds*groups)
		wantInOrder(t, r.all(), rounds*groups)
	})
}

// A lane that is being delivered is not emptied under its worker: Repartition
// waits, and when its context ends the count stays.
func TestRepartitionWaitsForTheOwner(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		began, goOn := make(chan struct{}), make(chan struct{})
		r := newRecorder()
		in := setUp(t, db, one(func(o *outbox.Outbox) {
			o.Relay = outbox.Each(func(ctx context.Context, e outbox.Envelope) error {
				if e.Type == "first" {
					close(began)
					<-goOn
				}
				return r.Deliver(ctx, []outbox.Envelope{e})
			})
		}))
		publish(t, db, grouped("first", "g"), grouped("second", "g"))
		start(t, in)
		<-began
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if err := in.Repartition(ctx, "orders", 6); err == nil {
			t.Error("Repartition did not wait for the delivery")
		}
		if s := mustStats(t, in); s.Partitions != 6 {
			t.Errorf("%d partitions are in force", s.Partitions)
		}
		close(goOn)
		if err := in.Repartition(t.Context(), "orders", 6); err != nil {
			t.Error(err)
		}
		r.wait(t, 2)
		if got := r.types(); !slices.Equal(got, []string{"first", "second"}) {
			t.Errorf("delivered %v", got)
		}
	})
}

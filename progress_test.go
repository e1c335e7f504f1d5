package outbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// These tests have a poll interval that never comes: what makes a worker go on
// must be its own doing.

func TestRetryIsDueByItself(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(func(o *outbox.Outbox) { o.Backoff = backoff.Constant(20 * time.Millisecond) })
		c.PollInterval = never
		var calls atomic.Int32
		c.Outboxes[0].Relay = outbox.Each(func(ctx context.Context, e outbox.Envelope) error {
			if calls.Add(1) <= 3 {
				return errors.New("refused")
			}
			return r.Deliver(ctx, []outbox.Envelope{e})
		})
		start(t, setUp(t, db, c))
		publish(t, db, grouped("first", "g"), grouped("second", "g"))
		if got := r.wait(t, 2); got[0].Attempts != 3 || got[1].Attempts != 0 {
			t.Errorf("delivered after %d and %d attempts, want 3 and 0", got[0].Attempts, got[1].Attempts)
		}
	})
}

func TestGroupGoesOnBehindItsDead(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(func(o *outbox.Outbox) { o.MaxAttempts = 1 })
		c.PollInterval = never
		c.Outboxes[0].Relay = outbox.Each(func(ctx context.Context, e outbox.Envelope) error {
			if e.Type == "bad" {
				return errors.New("refused")
			}
			return r.Deliver(ctx, []outbox.Envelope{e})
		})
		start(t, setUp(t, db, c))
		publish(t, db, grouped("bad", "g"), grouped("bad", "g"), grouped("good", "g"))
		r.wait(t, 1)
	})
}

func TestDelayedMessageIsDueByItself(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		c.PollInterval = never
		start(t, setUp(t, db, c))
		publish(t, db,
			outbox.Message{Type: "delayed", GroupKey: "g", Delay: 100 * time.Millisecond},
			outbox.Message{Type: "past", GroupKey: "g", DeliverAt: time.Now().Add(-time.Hour)},
			grouped("at once", "g"))
		r.wait(t, 3)
		if got := r.types(); !slices.Equal(got, []string{"past", "at once", "delayed"}) {
			t.Errorf("delivered %v", got)
		}
	})
}

// Drains share the work, also on SQLite where one process relays.
func TestDrainsAtOnce(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		in := setUp(t, db, c)
		publish(t, db, message("a"), message("b"))
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if _, err := in.Drain(t.Context()); err != nil {
					t.Errorf("Drain: %v", err)
				}
			})
		}
		wg.Wait()
		if n := len(r.all()); n != 2 {
			t.Errorf("%d deliveries, want 2", n)
		}
	})
}

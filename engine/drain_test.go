package engine_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
)

// drain drains, and checks what it came to.
func (f *fixture) drain(t *testing.T, want engine.DrainResult) {
	t.Helper()
	got, err := f.Drain(t.Context())
	if err != nil || got != want {
		t.Errorf("drain: %+v, %v; want %+v", got, err, want)
	}
}

func TestDrainDeliversOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 4, batchSize(3))
		f.drain(t, engine.DrainResult{})
		bad := f.storage.add(orders, "bad", "bad", "a", "b", "c", "", "")[0]
		f.storage.addDelayed(orders, "later", time.Hour)
		f.relay.set(naming(func(env engine.Envelope) error {
			if env.GroupKey == "bad" {
				return errBroken
			}
			return nil
		}))
		f.drain(t, engine.DrainResult{Delivered: 5, Failed: 1})
		f.wantPending(t, 3)
		if row := f.storage.row(bad); row.Attempts != 1 {
			t.Errorf("%d attempts, want 1", row.Attempts)
		}
		f.drain(t, engine.DrainResult{}) // it waits for its retry
		time.Sleep(2 * time.Second)
		f.relay.set(nil)
		f.drain(t, engine.DrainResult{Delivered: 2})
		if probes, fetches := f.storage.counts(); probes > 4 || fetches > 40 {
			t.Errorf("%d probes, %d fetches", probes, fetches)
		}
	})
}

// A retry that becomes due during the drain is left, and does not end it.
func TestDrainLeavesRetriesThatBecomeDue(t *testing.T) {
	for name, c := range map[string]struct {
		ordering engine.Ordering
		backoff  time.Duration
		want     engine.DrainResult
	}{
		"at once":               {engine.ByGroup, 0, engine.DrainResult{Delivered: 1000, Failed: 1}},
		"soon":                  {engine.ByGroup, 100 * time.Millisecond, engine.DrainResult{Delivered: 1000, Failed: 1}},
		"no order":              {engine.None, 0, engine.DrainResult{Delivered: 1000, Failed: 2}},
		"total: all wait":       {engine.Total, 0, engine.DrainResult{Delivered: 0, Failed: 1}},
		"total, in a long time": {engine.Total, time.Hour, engine.DrainResult{Delivered: 0, Failed: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1, batchSize(10), outbox(func(o *engine.OutboxConfig) {
					o.Ordering, o.Backoff = c.ordering, backoff.Constant(c.backoff)
				}))
				f.storage.add(orders, append([]string{"bad", "bad"}, repeated("", 1000)...)...)
				f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
					time.Sleep(50 * time.Millisecond)
					var failed engine.BatchError
					for _, env := range batch {
						if env.GroupKey == "bad" || c.ordering == engine.Total {
							failed.Fail(env.ID, errBroken)
						}
					}
					return &failed
				})
				f.drain(t, c.want)
			})
		})
	}
}

func TestDrainEndsWithMoreFailuresThanItCanLeaveAside(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.Backoff = backoff.Constant(0) }))
		for i := range 1500 {
			f.storage.add(orders, fmt.Sprint("bad-", i))
		}
		f.relay.set(naming(func(engine.Envelope) error { return errBroken }))
		got, err := f.Drain(t.Context())
		if err != nil || got.Delivered != 0 || got.Failed < 1000 || got.Failed > 2*1500 {
			t.Errorf("drain: %+v, %v", got, err)
		}
	})
}

func TestDrainLeavesAnOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 3)
		f.storage.add(orders, groupsOf(3)...)
		f.relay.set(always(errBroken))
		f.drain(t, engine.DrainResult{})
		f.wantPending(t, 3)
		f.wantUncharged(t)
	})
}

func TestDrainOfSomeOutboxes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := newMemory(map[string]int{orders: 1, "mails": 2})
		mails := &recorder{}
		f := setup(t, 1, func(c *engine.Config) {
			c.Storage = m
			c.Outboxes = append(c.Outboxes, engine.OutboxConfig{Name: "mails", Relay: mails})
		})
		f.storage = m
		m.add(orders, "a")
		m.add("mails", groupsOf(2)...)
		got, err := f.Drain(t.Context(), "mails")
		if err != nil || got.Delivered != 2 || len(mails.ids()) != 2 {
			t.Errorf("drain: %+v, %v", got, err)
		}
		f.wantPending(t, 1)
	})
}

// A drain shares the partitions with the workers, here and elsewhere.
func TestDrainWhileRunning(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 3, batchSize(2), func(c *engine.Config) { c.MaxDeliveries = 2 })
		f.relay.set(taking(10 * time.Millisecond))
		f.start(t)
		for range 5 {
			for range 10 {
				f.storage.add(orders, groupsOf(3)...)
			}
			f.Wake(engine.Wake{All: true})
			if _, err := f.Drain(t.Context()); err != nil {
				t.Errorf("drain: %v", err)
			}
			f.wantPending(t, 0)
		}
		if ids := f.relay.ids(); len(ids) != 150 {
			t.Errorf("%d deliveries of 150 messages", len(ids))
		}
		if n := f.relay.sideBySide(); n > 2 {
			t.Errorf("%d batches side by side, want 2 at most", n)
		}
	})
}

func TestDrainWaitsForAnotherOwner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.storage.add(orders, "a")
		release := f.storage.own(lane(0, 1))
		time.AfterFunc(10*time.Second, release)
		f.drain(t, engine.DrainResult{Delivered: 1})
		if took := time.Since(f.begun); took < 10*time.Second || took > 11*time.Second {
			t.Errorf("took %v", took)
		}
	})
}

// The partition count changes before, and while, a drain goes on.
func TestDrainWhilePartitionsChange(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2, batchSize(1))
		f.drain(t, engine.DrainResult{}) // the workers have run before
		f.storage.add(orders, groupsOf(8)...)
		f.storage.set(func(facts *engine.Facts) { facts.Partitions = 5 })
		change := true
		f.relay.set(func(context.Context, []engine.Envelope) error {
			if change {
				change = false
				f.storage.set(func(facts *engine.Facts) { facts.Partitions = 8 })
			}
			return nil
		})
		f.config.MaxDeliveries = 1
		f.drain(t, engine.DrainResult{Delivered: 8})
	})
}

func TestDrainGivesUpOnAFailingStorage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2)
		f.storage.add(orders, groupsOf(2)...)
		faults := 0
		f.storage.faults(func(m *memory) {
			m.onFetch = func(engine.Lane) error {
				if faults++; faults > 3 {
					return nil
				}
				return errBroken
			}
		})
		f.drain(t, engine.DrainResult{Delivered: 2}) // a short failure is got over
		f.storage.add(orders, groupsOf(2)...)
		f.storage.faults(func(m *memory) { m.onFetch = func(engine.Lane) error { return errBroken } })
		if _, err := f.Drain(t.Context()); !errors.Is(err, errBroken) {
			t.Errorf("drain: %v, want the storage's error", err)
		}
		f.storage.faults(func(m *memory) { m.onProbe = func() error { return errBroken } })
		if _, err := f.Drain(t.Context()); !errors.Is(err, errBroken) || !strings.HasPrefix(err.Error(), "drain: ") {
			t.Errorf("drain: %v, want the storage's error", err)
		}
	})
}

func TestDrainEndsWithItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts = 1 }))
		f.relay.set(engine.Each(func(ctx context.Context, _ engine.Envelope) error { return taking(time.Second)(ctx, nil) }).Deliver)
		f.storage.add(orders, repeated("a", 5)...)
		ctx, cancel := context.WithTimeout(t.Context(), 2500*time.Millisecond)
		defer cancel()
		got, err := f.Drain(ctx)
		if !errors.Is(err, context.DeadlineExceeded) || got.Delivered != 2 || got.Failed != 0 {
			t.Errorf("drain: %+v, %v; want 2 delivered and the context's error", got, err)
		}
		f.wantPending(t, 3) // what was delivered is recorded
		f.wantUncharged(t)
		if _, err := f.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("with an ended context: %v", err)
		}
	})
}

func TestDrainBesideAStuckCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2, func(c *engine.Config) { c.MaxDeliveries = 1 })
		hangs := make(chan struct{})
		f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
			if batch[0].Partition == 0 {
				<-hangs
			}
			return nil
		})
		f.storage.add(orders, groupsOf(2)...)
		f.start(t)
		time.Sleep(15 * time.Second)
		time.AfterFunc(time.Minute, func() { close(hangs) })
		f.storage.add(orders, groupsOf(2)...)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		time.AfterFunc(time.Second, func() { f.wantPending(t, 2) }) // those of the stuck partition
		if _, err := f.Drain(ctx); err != nil {
			t.Errorf("drain: %v", err)
		}
		f.wantPending(t, 0)
	})
}

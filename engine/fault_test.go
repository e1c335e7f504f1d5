package engine_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// C50: a relay that honours its context hangs no longer than the timeout, and
// disturbs no other partition.
func TestHangingRelay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2, outbox(func(o *engine.OutboxConfig) { o.DeliverTimeout = 5 * time.Second }))
		groups := groupsOf(2)
		f.relay.set(func(ctx context.Context, batch []engine.Envelope) error {
			if batch[0].Partition == 1 {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
		f.storage.add(orders, groups[1])
		f.start(t)
		for range 4 {
			f.storage.add(orders, groups[0])
			f.Wake(engine.Wake{All: true})
			time.Sleep(time.Second)
			f.wantPending(t, 1)
		}
		if !f.States()[1].Owning {
			t.Error("the partition is not owned while the relay works")
		}
		time.Sleep(1100 * time.Millisecond)
		s := f.States()[1]
		if s.Owning || s.Stuck || !errors.Is(s.Outage, context.DeadlineExceeded) {
			t.Errorf("after the timeout: %+v", s)
		}
		f.wantUncharged(t)
	})
}

// What a retry held back follows it at once, also if the retry dies.
func TestGroupFollowsItsRetry(t *testing.T) {
	for name, gets := range map[string]error{"through": nil, "dead": engine.Permanent(errBroken)} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts = 9 }), func(c *engine.Config) {
					c.Waker = &fakeWaker{state: engine.Push} // the next poll is far away
				})
				first := f.storage.add(orders, "a", "a", "a")[0]
				f.relay.set(naming(func(env engine.Envelope) error {
					switch {
					case env.ID == first && env.Attempts > 0:
						return gets
					case env.ID == first:
						return errBroken
					case f.storage.row(first) != nil && f.storage.row(first).Attempts == 0:
						return engine.ErrNotAttempted
					}
					return nil
				}))
				f.start(t)
				f.wantPending(t, 3)
				time.Sleep(2*time.Second + 2*time.Millisecond)
				f.wantPending(t, 0)
			})
		})
	}
}

// C50: a batch that takes longer than its time goes on with the next.
func TestSlowBatchGoesOn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.relay.set(engine.Each(func(context.Context, engine.Envelope) error {
			time.Sleep(3 * time.Second)
			return nil
		}).Deliver)
		f.storage.add(orders, repeated("a", 10)...)
		f.start(t)
		time.Sleep(30*time.Second + 500*time.Millisecond)
		f.wantPending(t, 0)
		f.wantUncharged(t)
		for _, d := range f.relay.recorded()[1:] {
			if d.at%(3*time.Second) > 100*time.Millisecond {
				t.Errorf("a batch begins after %v, want at the end of another", d.at)
			}
		}
	})
}

// C50: a relay that ignores its context is left to itself. Its partition goes
// to another node, and is served here again when the call has returned; what
// it returns comes too late.
func TestRelayThatIgnoresItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2)
		groups := groupsOf(2)
		hangs := make(chan struct{})
		f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
			if batch[0].Partition == 1 {
				<-hangs
			}
			return nil
		})
		stuck := f.storage.add(orders, groups[1])[0]
		f.start(t)
		time.Sleep(10*time.Second + 900*time.Millisecond)
		if s := f.States()[1]; s.Stuck || !s.Owning {
			t.Errorf("before the grace is over: %+v", s)
		}
		time.Sleep(200 * time.Millisecond)
		if s := f.States()[1]; !s.Stuck || s.Owning {
			t.Errorf("after the grace: %+v", s)
		}
		if n := len(f.observed.of(engine.DeliveryAbandoned)); n != 1 {
			t.Errorf("%d abandoned deliveries are observed, want 1", n)
		}

		f.relay.recorded()
		f.storage.add(orders, groups[0], groups[1])
		f.Wake(engine.Wake{All: true})
		time.Sleep(10 * time.Minute)
		f.wantPending(t, 2)
		if calls := f.relay.recorded(); len(calls) != 1 || calls[0].partition != 0 {
			t.Errorf("calls meanwhile: %+v", calls)
		}
		other := f.node()
		if err := other.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if calls := f.relay.recorded(); len(calls) != 1 || calls[0].partition != 1 {
			t.Errorf("calls of another node: %+v", calls)
		}
		other.stopHanging(t, 11*time.Second)

		close(hangs) // both calls say now that they delivered
		time.Sleep(31 * time.Second)
		f.wantPending(t, 0)
		if calls := f.relay.recorded(); len(calls) != 1 || calls[0].ids[0] != stuck || calls[0].attempts[0] != 0 {
			t.Errorf("calls after the return: %+v, want one that sends the messages again", calls)
		}
		if f.States()[1].Stuck {
			t.Error("the partition still counts as stuck")
		}
		f.wantLogs(t,
			"relay ignores the end of its context", "destination is unavailable",
			"relay ignores the end of its context", "destination is unavailable",
			"destination is available again")
	})
}

// stopHanging waits until the calls of a node are abandoned and stops it.
func (f *fixture) stopHanging(t *testing.T, d time.Duration) {
	t.Helper()
	time.Sleep(d)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := f.Stop(ctx); err == nil || !strings.Contains(err.Error(), `outbox "orders", partition 1`) {
		t.Errorf("stop: %v, want an error that names the call", err)
	}
}

// C22: who loses its partition stops sending, and nothing is charged.
func TestOwnershipLostDuringDelivery(t *testing.T) {
	for name, relay := range map[string]func(context.Context, []engine.Envelope) error{
		"whole": taking(time.Second),
		"named": func(ctx context.Context, batch []engine.Envelope) error {
			<-ctx.Done()
			return &engine.BatchError{Failed: map[int64]error{batch[0].ID: ctx.Err(), batch[1].ID: context.Cause(ctx)}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1)
				causes := make(chan error, 1)
				f.relay.set(func(ctx context.Context, batch []engine.Envelope) error {
					err := relay(ctx, batch)
					causes <- context.Cause(ctx)
					return err
				})
				f.storage.add(orders, "a", "b")
				f.start(t)
				time.Sleep(100 * time.Millisecond)
				f.storage.lose(lane(0, 1))
				if cause := <-causes; !errors.Is(cause, engine.ErrOwnershipLost) {
					t.Errorf("the delivery ended with %v", cause)
				}
				synctest.Wait()
				if n := len(f.observed.of(engine.OwnershipLost)); n != 1 {
					t.Errorf("%d lost partitions are observed, want 1", n)
				}
				f.wantPending(t, 2)
				f.wantUncharged(t)
				f.relay.set(nil)
				time.Sleep(time.Second)
				f.wantPending(t, 0)
				if n := len(f.observed.of(engine.OutageBegan)); n > 0 {
					t.Error("a lost partition counts as an outage")
				}
			})
		})
	}
}

// What was delivered before the partition was lost is recorded all the same.
func TestOwnershipLostAfterDelivery(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.relay.set(func(context.Context, []engine.Envelope) error {
			f.storage.lose(lane(0, 1))
			return nil
		})
		f.storage.add(orders, "a", "b")
		f.start(t)
		time.Sleep(time.Second)
		f.wantPending(t, 0)
		if calls := f.relay.recorded(); len(calls) != 1 {
			t.Errorf("%d calls, want 1", len(calls))
		}
	})
}

// C23: what was delivered but could not be recorded is recorded soon, not
// delivered again, and nobody is charged.
func TestSettleFailsOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, batchSize(2))
		commits := 0
		f.storage.faults(func(m *memory) {
			m.onCommit = func(engine.Lane, engine.Settlement) error {
				if commits++; commits == 1 {
					return errBroken
				}
				return nil
			}
		})
		f.storage.add(orders, "a", "a", "a")
		f.start(t)
		time.Sleep(time.Second)
		f.wantPending(t, 0)
		if ids := f.relay.ids(); len(ids) != 3 {
			t.Errorf("delivered %v, want each once", ids)
		}
		f.wantLogs(t, "a settlement was recorded late")
		if n := len(f.observed.of(engine.SettleFailed)); n > 0 {
			t.Error("a settlement that was recorded counts as failed")
		}
	})
}

// C23: where it cannot be recorded at all, the batch comes again.
func TestSettleFailsForLong(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.storage.faults(func(m *memory) {
			m.onCommit = func(engine.Lane, engine.Settlement) error { return errBroken }
			m.onSettle = func() error { return errBroken }
		})
		ids := f.storage.add(orders, "a", "b")
		f.start(t)
		time.Sleep(10 * time.Second)
		f.wantPending(t, 2)
		f.wantUncharged(t)
		if n := len(f.observed.of(engine.SettleFailed)); n == 0 {
			t.Error("the failure is not observed")
		}
		for _, d := range f.relay.recorded() {
			if d.ids[0] != ids[0] || d.attempts[0] != 0 {
				t.Errorf("redelivery %+v", d)
			}
		}
		f.storage.faults(func(m *memory) { m.onCommit, m.onSettle = nil, nil })
		time.Sleep(6 * time.Second)
		f.wantPending(t, 0)
		f.wantLogs(t, "storage fails", "storage works again")
	})
}

func writeTo(m map[string]int) { m["a"] = 1 }

// C53: a panic is the message's failure; the process, the worker and the other
// messages live.
func TestPanickingRelay(t *testing.T) {
	for name, c := range map[string]struct {
		do   func()
		text string
	}{
		"string":  {func() { panic("out of cheese") }, "out of cheese"},
		"error":   {func() { panic(errBroken) }, "broken"},
		"nil map": {func() { writeTo(nil) }, "nil map"},
		"goexit":  {runtime.Goexit, "Goexit"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts = 3 }))
				bad := f.storage.add(orders, "a", "bad", "b", "bad")[1]
				f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
					for _, env := range batch {
						if env.ID == bad {
							c.do()
						}
					}
					return nil
				})
				f.start(t)
				f.wantPending(t, 2)
				row := f.storage.row(bad)
				if row.Attempts != 1 || !strings.Contains(row.LastError, c.text) || len(row.LastError) > engine.MaxErrorBytes {
					t.Errorf("after %d attempts: %q", row.Attempts, row.LastError)
				}
				time.Sleep(10 * time.Second)
				f.wantPending(t, 0)
				if row := f.storage.row(bad); row.status != "dead" || row.Attempts != 3 {
					t.Errorf("status %q after %d attempts", row.status, row.Attempts)
				}
				if f.States()[0].Owning {
					t.Error("the partition is still owned")
				}
			})
		})
	}
}

type panickingObserver struct {
	mu   sync.Mutex
	seen int
}

func (o *panickingObserver) Observe(engine.Observation) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.seen++
	panic("observer")
}

// C53
func TestPanickingObserver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		observer := &panickingObserver{}
		f := setup(t, 1, batchSize(1), func(c *engine.Config) { c.Observer = observer })
		f.storage.add(orders, "a", "b", "c")
		f.start(t)
		f.wantPending(t, 0)
		if observer.seen != 3 {
			t.Errorf("%d observations, want 3", observer.seen)
		}
		f.wantLogs(t, "observer panicked")
	})
}

func TestObservedBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts = 2 }))
		f.storage.add(orders, "a")
		time.Sleep(3 * time.Second)
		ids := f.storage.add(orders, "b", "c", "c", "d")
		f.relay.set(func(context.Context, []engine.Envelope) error {
			time.Sleep(50 * time.Millisecond)
			return &engine.BatchError{Failed: map[int64]error{
				ids[0]: errBroken, ids[1]: engine.Permanent(errBroken), ids[2]: engine.ErrNotAttempted,
			}}
		})
		f.start(t)
		time.Sleep(60 * time.Millisecond)
		batches := f.observed.of(engine.BatchDone)
		want := engine.Observation{
			Kind: engine.BatchDone, Outbox: orders, Partition: 0,
			Delivered: 2, Failed: 1, Dead: 1, NotAttempted: 1, Took: 50 * time.Millisecond, Lag: 3 * time.Second,
		}
		if len(batches) == 0 || batches[0] != want {
			t.Errorf("observed %+v, want %+v first", batches, want)
		}
	})
}

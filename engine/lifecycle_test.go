package engine_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// within gives a context for a Stop.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// C51: with enough grace what is in delivery is settled, and no batch is begun.
func TestStopDuringADelivery(t *testing.T) {
	for name, stop := range map[string]func(*testing.T, *fixture, context.CancelFunc){
		"by Stop": func(t *testing.T, f *fixture, _ context.CancelFunc) {
			if err := f.Stop(within(t, 10*time.Second)); err != nil {
				t.Errorf("stop: %v", err)
			}
		},
		"by the context": func(_ *testing.T, f *fixture, cancel context.CancelFunc) {
			cancel()
			<-f.Done()
		},
		"by both": func(t *testing.T, f *fixture, cancel context.CancelFunc) {
			cancel()
			f.stop(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 2, batchSize(1))
				f.relay.set(taking(2 * time.Second))
				ids := f.storage.add(orders, slices.Repeat(groupsOf(2), 3)...)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if err := f.Start(ctx); err != nil {
					t.Fatal(err)
				}
				time.Sleep(500 * time.Millisecond)
				begun := time.Now()
				stop(t, f, cancel)
				if took := time.Since(begun); took != 1500*time.Millisecond {
					t.Errorf("stop took %v, want until the end of the deliveries", took)
				}
				f.storage.add(orders, "late")
				f.Wake(engine.Wake{All: true})
				time.Sleep(time.Minute)
				if got := f.relay.ids(); len(got) != 2 {
					t.Errorf("delivered %v, want one batch of each partition", got)
				}
				if got := f.storage.pending(); len(got) != 5 || slices.Contains(got, ids[0]) {
					t.Errorf("pending %v", got)
				}
				f.wantUncharged(t)
				f.wantLogs(t)
			})
		})
	}
}

// C51: with too little grace the batch comes again, uncharged; what an Each
// had delivered of it is kept.
func TestStopInterruptsADelivery(t *testing.T) {
	named := func(ctx context.Context, batch []engine.Envelope) error {
		<-ctx.Done()
		var e engine.BatchError
		for _, env := range batch {
			e.Fail(env.ID, ctx.Err())
		}
		return &e
	}
	each := engine.Each(func(ctx context.Context, _ engine.Envelope) error { return taking(300*time.Millisecond)(ctx, nil) })
	for name, c := range map[string]struct {
		relay func(context.Context, []engine.Envelope) error
		left  int
	}{
		"whole": {taking(2 * time.Second), 5},
		"named": {named, 5},
		"each":  {each.Deliver, 3}, // of 100 ms and 500 ms of grace
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts = 1 }))
				f.relay.set(c.relay)
				f.storage.add(orders, repeated("a", 5)...)
				f.start(t)
				time.Sleep(100 * time.Millisecond)
				begun := time.Now()
				if err := f.Stop(within(t, 500*time.Millisecond)); err != nil {
					t.Errorf("stop: %v; the relay returned in time", err)
				}
				if took := time.Since(begun); took != 500*time.Millisecond {
					t.Errorf("stop took %v", took)
				}
				f.wantPending(t, c.left)
				f.wantUncharged(t)
				f.wantLogs(t) // an interruption is no outage
				f.relay.set(nil)
				f.start(t)
				f.wantPending(t, 0)
			})
		})
	}
}

// C51: the end of Start's context leaves StopTimeout to the deliveries.
func TestStopTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, func(c *engine.Config) { c.StopTimeout = 3 * time.Second })
		f.relay.set(taking(9 * time.Second))
		f.storage.add(orders, "a")
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), ctxKey{}, "value"))
		if err := f.Start(ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		begun := time.Now()
		cancel()
		<-f.Done()
		if took := time.Since(begun); took != 3*time.Second {
			t.Errorf("stop took %v, want StopTimeout", took)
		}
		f.wantPending(t, 1)
		f.wantUncharged(t)
	})
}

type ctxKey struct{}

// A relay gets the values of Start's context, not its end.
func TestRelayContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), ctxKey{}, "value"))
		f.relay.set(func(got context.Context, _ []engine.Envelope) error {
			cancel()
			if got.Value(ctxKey{}) != "value" || got.Err() != nil {
				t.Errorf("value %v, err %v", got.Value(ctxKey{}), got.Err())
			}
			if deadline, ok := got.Deadline(); !ok || time.Until(deadline) != engine.DefaultDeliverTimeout {
				t.Errorf("deadline in %v", time.Until(deadline))
			}
			return nil
		})
		f.storage.add(orders, "a")
		if err := f.Start(ctx); err != nil {
			t.Fatal(err)
		}
		<-f.Done()
		f.wantPending(t, 0)
	})
}

// C52: a Stop names a relay that ignores its context, and so does the next one
// until it has returned.
func TestStopNamesWhatStillRuns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 3)
		hangs := make(chan struct{})
		f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
			if batch[0].Partition == 2 {
				<-hangs
			}
			return nil
		})
		f.storage.add(orders, groupsOf(3)[2])
		f.start(t)
		begun := time.Now()
		for i := range 2 {
			err := f.Stop(within(t, time.Second))
			if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), `a relay call of outbox "orders", partition 2`) {
				t.Errorf("stop %d: %v", i, err)
			}
		}
		if took := time.Since(begun); took != 3*time.Second { // with a second of grace
			t.Errorf("the stops took %v", took)
		}
		<-f.Done()
		if err := f.Start(t.Context()); err != nil { // the others go on
			t.Errorf("start: %v", err)
		}
		f.storage.add(orders, groupsOf(3)...)
		time.Sleep(time.Minute)
		f.wantPending(t, 2)
		close(hangs)
		time.Sleep(time.Minute)
		f.wantPending(t, 0)
	})
}

// C52: the same for a storage that ignores its context.
func TestStopNamesAHangingStorage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.start(t)
		hangs := make(chan struct{})
		f.storage.faults(func(m *memory) { m.slow = func(context.Context) { <-hangs } })
		time.Sleep(2 * time.Second)
		err := f.Stop(within(t, time.Second))
		if err == nil || !strings.Contains(err.Error(), "storage") {
			t.Errorf("stop: %v, want an error that names it", err)
		}
		if err := f.Start(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
			t.Errorf("start of what has not stopped: %v", err)
		}
		f.storage.faults(func(m *memory) { m.slow = nil })
		close(hangs)
		<-f.Done()
	})
}

// C52
func TestLifecycle(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 4)
		isDone := func() bool {
			select {
			case <-f.Done():
				return true
			default:
				return false
			}
		}
		if !isDone() {
			t.Error("not done before Start")
		}
		f.stop(t) // before Start
		f.Wake(engine.Wake{All: true})
		for range 200 {
			if err := f.Start(t.Context()); err != nil {
				t.Fatalf("start: %v", err)
			}
			if isDone() {
				t.Fatal("done while running")
			}
			if err := f.Start(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
				t.Fatalf("second start: %v, want ErrAlreadyRunning", err)
			}
			f.storage.add(orders, groupsOf(4)...)
			f.Wake(engine.Wake{All: true})
			synctest.Wait()
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() { f.stop(t) })
			}
			wg.Wait()
			f.stop(t)
			if !isDone() {
				t.Fatal("not done after Stop")
			}
			f.wantPending(t, 0)
		}
	})
}

func TestStartFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		if err := f.Start(cancelled); !errors.Is(err, context.Canceled) {
			t.Errorf("with an ended context: %v", err)
		}
		f.storage.faults(func(m *memory) { m.onProbe = func() error { return errBroken } })
		if err := f.Start(t.Context()); !errors.Is(err, errBroken) {
			t.Errorf("without a database: %v", err)
		}
		<-f.Done()
		f.storage.faults(func(m *memory) { m.onProbe = nil })
		f.start(t) // and then it can be started
	})
}

// C52: a Stop during a Start ends it, and nothing waits for it meanwhile.
func TestStopDuringStart(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.storage.faults(func(m *memory) { m.slow = func(ctx context.Context) { <-ctx.Done() } })
		started := make(chan error, 1)
		go func() { started <- f.Start(t.Context()) }()
		synctest.Wait()
		f.Wake(engine.Wake{All: true}) // does not block
		if n := len(f.States()); n != 0 {
			t.Errorf("%d states", n)
		}
		if err := f.Start(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
			t.Errorf("second start: %v", err)
		}
		begun := time.Now()
		f.stop(t)
		if took := time.Since(begun); took > 0 {
			t.Errorf("stop took %v", took)
		}
		if err := <-started; !errors.Is(err, engine.ErrStopped) {
			t.Errorf("start: %v, want ErrStopped", err)
		}
	})
}

// exclusiveMemory is a storage that one process relays from.
type exclusiveMemory struct {
	*memory
	taken chan struct{} // of one
	fails error         // of release
}

func (m *exclusiveMemory) Exclude(ctx context.Context) (func() error, error) {
	patience, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	select {
	case m.taken <- struct{}{}:
		return func() error {
			<-m.taken
			return m.fails
		}, nil
	case <-patience.Done():
		return nil, engine.ErrAlreadyRunning
	}
}

// C68
func TestExclusiveStorage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := &exclusiveMemory{memory: newMemory(map[string]int{orders: 1}), taken: make(chan struct{}, 1)}
		f := setup(t, 1, func(c *engine.Config) { c.Storage = m })
		f.storage = m.memory
		other := f.node()
		f.start(t)
		if err := other.Start(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
			t.Errorf("second process: %v, want ErrAlreadyRunning", err)
		}
		if _, err := other.Drain(t.Context()); !errors.Is(err, engine.ErrAlreadyRunning) {
			t.Errorf("drain of a second process: %v, want ErrAlreadyRunning", err)
		}
		if _, err := f.Drain(t.Context()); err != nil { // it has the right already
			t.Errorf("drain of the first: %v", err)
		}
		f.stop(t)
		if _, err := f.Drain(t.Context()); err != nil { // takes it and lets it go
			t.Errorf("drain of a stopped engine: %v", err)
		}
		m.onProbe = func() error { return errBroken }
		if err := f.Start(t.Context()); !errors.Is(err, errBroken) {
			t.Errorf("start: %v", err)
		}
		m.onProbe = nil
		other.start(t) // a failed start has let go, too
		m.fails = errBroken
		other.stop(t)
		f.wantLogs(t, "release of the exclusive right to relay failed")
	})
}

// Started and stopped from everywhere at once, in real time.
func TestStress(t *testing.T) {
	t.Parallel()
	f := setup(t, 4, batchSize(3), func(c *engine.Config) {
		c.PollInterval, c.MaxDeliveries = time.Millisecond, 2
		c.Waker = &fakeWaker{state: engine.Push}
	})
	f.relay.set(func(ctx context.Context, batch []engine.Envelope) error {
		switch rand.IntN(10) {
		case 0:
			return errBroken
		case 1:
			panic("now and then")
		case 2:
			<-ctx.Done()
			return ctx.Err()
		}
		return engine.Each(func(context.Context, engine.Envelope) error { return nil }).Deliver(ctx, batch)
	})
	f.storage.add(orders, slices.Repeat(groupsOf(4), 50)...)

	var wg sync.WaitGroup
	const rounds = 300
	for _, action := range []func(context.Context){
		func(ctx context.Context) { _ = f.Start(ctx) },
		func(ctx context.Context) { _ = f.Start(ctx) },
		func(ctx context.Context) { _ = f.Stop(ctx) },
		func(ctx context.Context) { _ = f.Stop(ctx) },
		func(ctx context.Context) { _, _ = f.Drain(ctx) },
		func(context.Context) { f.Wake(engine.Wake{Outbox: orders, Hash: rand.Uint64()}) },
		func(context.Context) { f.States() },
		func(context.Context) {
			f.storage.set(func(facts *engine.Facts) { facts.Partitions = 1 + rand.IntN(6) })
			f.storage.add(orders, "x", "")
		},
	} {
		wg.Go(func() {
			for range rounds {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(3))*time.Millisecond)
				action(ctx)
				cancel()
			}
		})
	}
	wg.Wait()
	if err := f.Stop(within(t, time.Minute)); err != nil {
		t.Errorf("stop: %v", err)
	}
	f.relay.set(nil)
	if _, err := f.Drain(t.Context()); err != nil {
		t.Errorf("drain: %v", err)
	}
	if n := f.relay.sideBySide(); n > 2 {
		t.Errorf("%d batches side by side, want 2 at most", n)
	}
}

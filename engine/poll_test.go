package engine_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

// C57: an idle engine makes one probe an interval, however many partitions
// there are, and no fetch.
func TestIdleEngineOnlyProbes(t *testing.T) {
	for name, c := range map[string]struct {
		waker      engine.Waker
		interval   time.Duration
		partitions int
		want       int // probes in ten minutes
	}{
		"without push":             {nil, 0, 32, 600},
		"one partition":            {nil, 0, 1, 600},
		"own interval":             {nil, 5 * time.Second, 32, 120},
		"degraded":                 {&fakeWaker{state: engine.Degraded}, 0, 32, 600},
		"polling":                  {&fakeWaker{state: engine.Polling}, 0, 32, 600},
		"push":                     {&fakeWaker{state: engine.Push}, 0, 32, 20},
		"push, own interval":       {&fakeWaker{state: engine.Push}, 7 * time.Second, 32, 21},
		"push, even less often":    {&fakeWaker{state: engine.Push}, time.Minute, 32, 10},
		"push, short own interval": {&fakeWaker{state: engine.Push}, 100 * time.Millisecond, 32, 20},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, c.partitions, func(config *engine.Config) {
					config.Waker, config.PollInterval = c.waker, c.interval
				})
				f.start(t)
				probes, fetches := f.storage.counts()
				time.Sleep(10*time.Minute + time.Millisecond)
				moreProbes, moreFetches := f.storage.counts()
				if got := moreProbes - probes; got < c.want-1 || got > c.want {
					t.Errorf("%d probes in ten minutes, want %d", got, c.want)
				}
				if got := moreFetches - fetches; got != 0 {
					t.Errorf("%d fetches with nothing to fetch", got)
				}
			})
		})
	}
}

// Rule 7: whatever no wake-up told is found within a poll interval.
func TestPollFindsWhatNobodyTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		waker := &fakeWaker{state: engine.Push}
		f := setup(t, 4, func(c *engine.Config) { c.Waker = waker })
		f.start(t)
		f.storage.add(orders, "a", "b", "c")
		time.Sleep(29 * time.Second)
		f.wantPending(t, 3)
		time.Sleep(time.Second + time.Millisecond)
		f.wantPending(t, 0)

		waker.set(engine.Degraded) // noticed within the short interval
		time.Sleep(2 * time.Second)
		f.storage.add(orders, "a", "b", "c")
		time.Sleep(time.Second + time.Millisecond)
		f.wantPending(t, 0)
		if got := f.PushState(); got != engine.Degraded {
			t.Errorf("push state %v, want degraded", got)
		}
	})
}

func TestPushStateWithoutWaker(t *testing.T) {
	t.Parallel()
	if got := setup(t, 1).PushState(); got != engine.Polling {
		t.Errorf("push state %v, want polling", got)
	}
}

func TestWakerWakes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		waker := &fakeWaker{state: engine.Push}
		f := setup(t, 1, func(c *engine.Config) { c.Waker = waker })
		f.start(t)
		f.storage.add(orders, "a")
		waker.wake(engine.Wake{Outbox: orders, Hash: engine.GroupHash("a")})
		synctest.Wait()
		f.wantPending(t, 0)
	})
}

func TestWakerThatGivesUpIsLoggedAndMissed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, func(c *engine.Config) { c.Waker = &fakeWaker{err: errBroken} })
		f.start(t)
		f.storage.add(orders, "a")
		time.Sleep(time.Second + time.Millisecond)
		f.wantPending(t, 0)
		f.wantLogs(t, "listening for wake-ups ended")
	})
}

// Rule 7: partitions changed with a backlog, up and down.
func TestPartitionCountChangesWhileRunning(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, batchSize(1))
		f.start(t)
		f.relay.set(taking(10 * time.Millisecond))
		groups := groupsOf(8)
		for _, n := range []int{8, 3, 8, 1, 4} {
			before := f.storage.add(orders, append(groups, groups...)...)
			f.storage.set(func(facts *engine.Facts) { facts.Partitions = n })
			f.storage.add(orders, groups...)
			time.Sleep(5 * time.Second)
			f.wantPending(t, 0)
			if got := len(f.States()); got != n {
				t.Errorf("%d partitions are served, want %d", got, n)
			}
			// The second message of a group has an id that is higher by 8.
			at := make(map[int64]int)
			for i, id := range f.relay.ids() {
				at[id] = i
			}
			for i := range groups {
				if at[before[i]] > at[before[i+8]] || at[before[i+8]] > at[before[15]+int64(i)+1] {
					t.Errorf("%d partitions: group %s is out of order", n, groups[i])
				}
			}
		}
		f.wantLogs(t)
	})
}

// A lane of the old count that its owner has not let go of is waited for.
func TestStrayMessagesOfABusyLane(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2)
		f.storage.add(orders, groupsOf(2)...)
		release := f.storage.own(lane(1, 2))
		f.storage.set(func(facts *engine.Facts) { facts.Partitions = 5 })
		f.start(t)
		time.Sleep(time.Minute)
		f.wantPending(t, 2) // no group may be touched
		release()
		time.Sleep(time.Second)
		f.wantPending(t, 0)
	})
}

func TestPausedOutbox(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2)
		f.start(t)
		f.storage.set(func(facts *engine.Facts) { facts.Paused = true })
		f.storage.add(orders, groupsOf(2)...)
		f.Wake(engine.Wake{All: true})
		_, before := f.storage.counts()
		time.Sleep(time.Minute)
		if _, fetches := f.storage.counts(); fetches > before+2 {
			t.Errorf("%d fetches while paused, want those of the wake alone", fetches-before)
		}
		f.wantPending(t, 2)
		f.storage.set(func(facts *engine.Facts) { facts.Paused = false })
		time.Sleep(time.Second + time.Millisecond)
		f.wantPending(t, 0)
	})
}

// A pause is for the next batch: the one in delivery is settled.
func TestPauseDuringADelivery(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, batchSize(1))
		f.relay.set(taking(time.Second))
		f.storage.add(orders, "a", "a")
		f.start(t)
		time.Sleep(100 * time.Millisecond)
		f.storage.set(func(facts *engine.Facts) { facts.Paused = true })
		time.Sleep(time.Minute)
		f.wantPending(t, 1)
	})
}

// A worker of a partition that is gone takes its outage along.
func TestOutageOfAPartitionThatIsGone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 2)
		f.relay.set(always(errBroken))
		ids := f.storage.add(orders, groupsOf(2)...)
		f.start(t)
		time.Sleep(time.Second)
		f.storage.faults(func(m *memory) { // the second partition has nothing left
			m.outboxes[orders].settle(engine.Settlement{Delivered: ids[1:]})
			m.outboxes[orders].Partitions = 1
		})
		time.Sleep(10 * time.Second)
		f.relay.set(nil)
		time.Sleep(time.Minute)
		f.wantPending(t, 0)
		f.wantLogs(t, "destination is unavailable", "destination is available again")
	})
}

func TestProbeThatHangsEndsWithTheEngine(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.start(t)
		f.storage.faults(func(m *memory) { m.slow = func(ctx context.Context) { <-ctx.Done() } })
		time.Sleep(5 * time.Second)
		begun := time.Now()
		f.stop(t)
		if took := time.Since(begun); took > 0 {
			t.Errorf("stop took %v", took)
		}
		f.wantLogs(t) // being stopped is no failure of the storage
	})
}

func TestWakerSeesTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ended := make(chan error, 1)
		f := setup(t, 1, func(c *engine.Config) { c.Waker = waitingWaker{ended} })
		f.start(t)
		f.stop(t)
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Listen ended with %v", err)
		}
		f.wantLogs(t)
	})
}

type waitingWaker struct{ ended chan error }

func (w waitingWaker) Listen(ctx context.Context, _ func(engine.Wake)) error {
	<-ctx.Done()
	w.ended <- ctx.Err()
	return ctx.Err()
}

func (waitingWaker) State() engine.PushState { return engine.Push }

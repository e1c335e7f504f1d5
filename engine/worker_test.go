package engine_test

import (
	"context"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

func batchSize(n int) func(*engine.Config) {
	return outbox(func(o *engine.OutboxConfig) { o.BatchSize = n })
}

func TestFullBatchIsFollowedAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, batchSize(10))
		ids := f.storage.add(orders, slices.Repeat([]string{"a", ""}, 12)...)
		f.start(t)
		calls := f.relay.recorded()
		var got []int64
		for i, d := range calls {
			got = append(got, d.ids...)
			if d.at != 0 || len(d.ids) != min(10, 24-10*i) {
				t.Errorf("call %d: %d messages after %v", i, len(d.ids), d.at)
			}
		}
		if !slices.Equal(got, ids) {
			t.Errorf("delivered %v, want %v", got, ids)
		}
		f.wantPending(t, 0)
	})
}

func TestWake(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 4)
		f.start(t)
		group := "a"
		of := engine.GroupHash(group)
		for name, c := range map[string]struct {
			wake  engine.Wake
			finds bool
		}{
			"its group":              {engine.Wake{Outbox: orders, Hash: of}, true},
			"another partition":      {engine.Wake{Outbox: orders, Hash: of + 1}, false},
			"the whole outbox":       {engine.Wake{Outbox: orders, All: true}, true},
			"another outbox":         {engine.Wake{Outbox: "mails", All: true}, false},
			"all outboxes":           {engine.Wake{All: true}, true},
			"the largest hash there": {engine.Wake{Outbox: orders, Hash: 1<<64 - 4 + of%4}, true},
		} {
			f.storage.add(orders, group)
			f.Wake(c.wake)
			synctest.Wait()
			if found := len(f.relay.ids()) == 1; found != c.finds {
				t.Errorf("a wake of %s finds the message: %v, want %v", name, found, c.finds)
			}
			f.Wake(engine.Wake{All: true})
			synctest.Wait()
			f.relay.recorded()
		}
	})
}

func TestWakeWhileDelivering(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.relay.set(taking(500 * time.Millisecond))
		first := f.storage.add(orders, "a")
		f.start(t)
		time.Sleep(100 * time.Millisecond)
		second := f.storage.add(orders, "a")
		f.Wake(engine.Wake{Outbox: orders, Hash: engine.GroupHash("a")})
		time.Sleep(500 * time.Millisecond)
		calls := f.relay.recorded()
		if len(calls) != 2 || calls[1].at != 500*time.Millisecond {
			t.Fatalf("calls %+v, want the second right after the first", calls)
		}
		if calls[0].ids[0] != first[0] || calls[1].ids[0] != second[0] {
			t.Errorf("calls %+v", calls)
		}
	})
}

func TestDelayedMessageIsDeliveredWhenDue(t *testing.T) {
	for name, c := range map[string]struct {
		delay time.Duration
		wake  bool
	}{
		"woken":         {700 * time.Millisecond, true},
		"woken, later":  {10 * time.Minute, true},
		"found by poll": {2500 * time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1)
				f.start(t)
				f.storage.addDelayed(orders, "", c.delay)
				if c.wake {
					f.Wake(engine.Wake{All: true})
				}
				time.Sleep(c.delay - time.Millisecond)
				f.wantPending(t, 1)
				time.Sleep(3 * time.Millisecond)
				f.wantPending(t, 0)
			})
		})
	}
}

// fetchTimes notes when fetches happen, and makes them fail.
func (f *fixture) fetchTimes(fails error) (recorded func() []time.Duration) {
	var times []time.Duration
	f.storage.faults(func(m *memory) {
		m.onFetch = func(engine.Lane) error {
			times = append(times, time.Since(f.begun))
			return fails
		}
	})
	return func() []time.Duration {
		f.storage.mu.Lock()
		defer f.storage.mu.Unlock()
		return slices.Clone(times)
	}
}

// wantGrowing checks that the gaps between times double from least to most,
// give or take the jitter.
func wantGrowing(t *testing.T, times []time.Duration, least, most time.Duration) {
	t.Helper()
	want := least
	for i := 1; i < len(times); i++ {
		if gap := times[i] - times[i-1]; gap < want*9/10 || gap > want*11/10 {
			t.Errorf("gap %d is %v, want about %v", i, gap, want)
		}
		want = min(want*2, most)
	}
	if want < most {
		t.Errorf("only %d attempts", len(times))
	}
}

func TestBusyPartitionIsAskedForAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.storage.add(orders, "a")
		release := f.storage.own(lane(0, 1))
		times := f.fetchTimes(nil)
		f.start(t)
		for range 100 { // wakes do not make it ask sooner
			time.Sleep(20 * time.Millisecond)
			f.Wake(engine.Wake{All: true})
		}
		wantGrowing(t, times(), 5*time.Millisecond, 250*time.Millisecond)
		release()
		time.Sleep(275 * time.Millisecond)
		f.wantPending(t, 0)
		f.wantLogs(t)
	})
}

func TestFailingStorageIsAskedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 3)
		f.storage.add(orders, "a")
		times := f.fetchTimes(errBroken)
		f.start(t)
		time.Sleep(time.Minute)
		wantGrowing(t, times(), 100*time.Millisecond, 5*time.Second)
		f.storage.faults(func(m *memory) { m.onFetch = nil })
		time.Sleep(6 * time.Second)
		f.wantPending(t, 0)
		f.wantUncharged(t)
	})
}

// One line a change of state, however often and wherever it is met.
func TestFailingStorageIsLoggedOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 8)
		f.start(t)
		for range 8 {
			f.storage.add(orders, "a", "b", "c", "d", "e", "f", "g", "h")
		}
		fail := func() error { return errBroken }
		f.storage.faults(func(m *memory) {
			m.onProbe, m.onFetch = fail, func(engine.Lane) error { return errBroken }
		})
		f.Wake(engine.Wake{All: true})
		time.Sleep(30 * time.Second)
		f.wantLogs(t, "storage fails")
		f.storage.faults(func(m *memory) { m.onProbe, m.onFetch = nil, nil })
		time.Sleep(6 * time.Second)
		f.wantLogs(t, "storage fails", "storage works again")
		f.wantPending(t, 0)
	})
}

func TestYieldsAfterManyBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, batchSize(1))
		f.storage.add(orders, repeated("a", 40)...)
		f.start(t)
		time.Sleep(20 * time.Millisecond)
		calls := f.relay.recorded()
		if len(calls) != 40 {
			t.Fatalf("%d messages delivered, want 40", len(calls))
		}
		for i := 1; i < len(calls); i++ {
			gap := calls[i].at - calls[i-1].at
			if yields := i%16 == 0; yields != (gap > 0) {
				t.Errorf("pause of %v before batch %d", gap, i)
			}
		}
	})
}

func TestYieldsAfterASecond(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, batchSize(1))
		f.relay.set(taking(400 * time.Millisecond))
		f.storage.add(orders, repeated("a", 8)...)
		f.start(t)
		time.Sleep(4 * time.Second)
		calls := f.relay.recorded()
		for i := 1; i < len(calls); i++ {
			gap := calls[i].at - calls[i-1].at - 400*time.Millisecond
			if yields := i%3 == 0; yields != (gap > 0) {
				t.Errorf("pause of %v before batch %d", gap, i)
			}
		}
		f.wantPending(t, 0)
	})
}

// groupsOf gives a group for each of n partitions.
func groupsOf(n int) []string {
	groups := make([]string, n)
	for i, missing := 0, n; missing > 0; i++ {
		group := strconv.Itoa(i)
		if p := engine.Partition(engine.GroupHash(group), n); groups[p] == "" {
			groups[p] = group
			missing--
		}
	}
	return groups
}

// C55: nodes that come later get their share of partitions that are never
// empty, and take over those of a node that stops.
func TestNodesShareTheWork(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const partitions = 12
		first := setup(t, partitions, batchSize(1))
		first.relay.set(func(_ context.Context, batch []engine.Envelope) error {
			time.Sleep(5 * time.Millisecond)
			first.storage.add(orders, batch[0].GroupKey)
			return nil
		})
		first.storage.add(orders, slices.Repeat(groupsOf(partitions), 2)...)
		nodes := []*fixture{first, first.node(), first.node()}
		nodes[0].start(t)
		time.Sleep(time.Second)
		nodes[1].start(t)
		nodes[2].start(t)

		owned := make([]int, len(nodes))
		for range 500 {
			time.Sleep(20 * time.Millisecond)
			for i, f := range nodes {
				for _, s := range f.States() {
					if s.Owning {
						owned[i]++
					}
				}
			}
		}
		all := owned[0] + owned[1] + owned[2]
		for i, n := range owned {
			if n < all/10 {
				t.Errorf("node %d owned %d of %d, want a tenth at least", i, n, all)
			}
		}
		nodes[0].stop(t)
		first.relay.recorded()
		time.Sleep(time.Second)
		served := make(map[int]bool)
		for _, d := range first.relay.recorded() {
			served[d.partition] = true
		}
		if len(served) != partitions {
			t.Errorf("after a stop %d partitions of %d are served within a poll interval", len(served), partitions)
		}
	})
}

// Rule 9: more partitions than deliveries take turns.
func TestPartitionsTakeTurns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const partitions, deliveries = 12, 3
		f := setup(t, partitions, batchSize(1), func(c *engine.Config) { c.MaxDeliveries = deliveries })
		f.relay.set(taking(10 * time.Millisecond))
		for i := range partitions * 200 {
			f.storage.add(orders, string(rune('a'+i%26)))
		}
		f.start(t)
		time.Sleep(5 * time.Second)
		if n := f.relay.sideBySide(); n != deliveries {
			t.Errorf("%d batches side by side, want %d", n, deliveries)
		}
		// A turn is 16 batches of 10 ms; with fair turns a partition waits for
		// those of the others, a fourth of 11 of them at a time.
		last := make(map[int]time.Duration)
		for _, d := range f.relay.recorded() {
			if wait := d.at - last[d.partition]; wait > 900*time.Millisecond {
				t.Errorf("partition %d waits %v for its turn", d.partition, wait)
			}
			last[d.partition] = d.at
		}
		if len(last) < 10 {
			t.Errorf("only %d partitions had a turn", len(last))
		}
	})
}

// C48, in small.
func TestPrune(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, outbox(func(o *engine.OutboxConfig) {
			o.Retention, o.DeadRetention, o.MaxAttempts = engine.Keep(time.Minute), time.Hour, 1
		}))
		f.relay.set(naming(func(env engine.Envelope) error {
			if env.GroupKey == "bad" {
				return errBroken
			}
			return nil
		}))
		f.storage.add(orders, slices.Concat(repeated("", 2500), repeated("bad", 1))...)
		f.start(t)
		time.Sleep(59 * time.Second)
		if n := len(f.storage.with("delivered")); n != 2500 {
			t.Errorf("%d delivered messages are kept, want 2500", n)
		}
		time.Sleep(35 * time.Second)
		if n := len(f.storage.with("delivered")); n != 0 {
			t.Errorf("%d delivered messages are kept past their retention", n)
		}
		if n := len(f.storage.with("dead")); n != 1 {
			t.Errorf("%d dead messages are kept, want 1", n)
		}
		f.storage.addDelayed(orders, "", 100*time.Hour) // never pruned
		time.Sleep(2 * time.Hour)
		if n := len(f.storage.with("dead")); n != 0 {
			t.Errorf("%d dead messages are kept past their retention", n)
		}
		f.wantPending(t, 1)
	})
}

func TestPruneKeepsItsProgress(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.Retention = engine.Keep(time.Second) }))
		f.storage.add(orders, repeated("", 3000)...)
		if _, err := f.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		calls := 0
		f.storage.faults(func(m *memory) {
			m.onPrune = func() error {
				if calls++; calls == 3 {
					return context.Canceled
				}
				return nil
			}
		})
		n, err := f.Prune(t.Context())
		if n != 2000 || err == nil {
			t.Errorf("pruned %d with error %v, want 2000 and an error", n, err)
		}
		if kept := len(f.storage.with("delivered")); kept != 1000 {
			t.Errorf("%d messages are left, want 1000", kept)
		}
	})
}

func TestNothingIsPrunedWithoutRetention(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.start(t)
		time.Sleep(time.Hour)
		f.storage.faults(func(m *memory) {
			if m.prunes > 0 {
				t.Errorf("%d prunings", m.prunes)
			}
		})
	})
}

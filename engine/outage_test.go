package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
)

// C46: an outage, however long, charges nobody, kills nobody and is one line
// in the log.
func TestOutage(t *testing.T) {
	for name, relay := range map[string]func(context.Context, []engine.Envelope) error{
		"any error":   always(errBroken),
		"batch error": always(&engine.BatchError{Outage: errBroken, Failed: map[int64]error{}}),
		"each":        engine.Each(func(context.Context, engine.Envelope) error { return engine.Unavailable(errBroken) }).Deliver,
	} {
		if name == "batch error" {
			relay = func(_ context.Context, batch []engine.Envelope) error {
				e := &engine.BatchError{Outage: errBroken}
				for _, env := range batch {
					e.Fail(env.ID, engine.ErrNotAttempted)
				}
				return e
			}
		}
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 4, outbox(func(o *engine.OutboxConfig) {
					o.MaxAttempts, o.GiveUpAfter, o.Backoff = 3, time.Minute, backoff.Exponential{Jitter: backoff.NoJitter}
				}))
				f.start(t)
				f.storage.add(orders, groupsOf(4)...)
				time.Sleep(5 * time.Second)
				f.wantPending(t, 0)
				f.relay.recorded()

				f.relay.set(relay)
				for range 50 {
					f.storage.add(orders, append(groupsOf(4), repeated("", 5)...)...)
				}
				time.Sleep(30 * time.Minute)
				f.wantPending(t, 450)
				f.wantUncharged(t)
				f.wantLogs(t, "destination is unavailable")
				f.wantOutage(t, 4)
				if calls := len(f.relay.recorded()); calls > 4*4*30*2 {
					t.Errorf("%d calls in half an hour", calls)
				}

				f.relay.set(nil)
				time.Sleep(31 * time.Second)
				f.wantPending(t, 0)
				f.wantLogs(t, "destination is unavailable", "destination is available again")
				f.wantOutage(t, 0)
				if ids := f.relay.ids(); len(ids) != 450 {
					t.Errorf("%d deliveries after the outage, want 450", len(ids))
				}
			})
		})
	}
}

// wantOutage checks how many partitions count as down, in the states and by
// what was observed.
func (f *fixture) wantOutage(t *testing.T, want int) {
	t.Helper()
	down := 0
	for _, s := range f.States() {
		if s.Outage == nil {
			continue
		}
		down++
		if !errors.Is(s.Outage, errBroken) || time.Since(s.Since) < 29*time.Minute {
			t.Errorf("outage %v since %v", s.Outage, time.Since(s.Since))
		}
	}
	if down != want {
		t.Errorf("%d partitions are down, want %d", down, want)
	}
	if got := len(f.observed.of(engine.OutageBegan)) - len(f.observed.of(engine.OutageEnded)); got != want {
		t.Errorf("%d outages are observed, want %d", got, want)
	}
}

// C44: the waits of an outage follow the backoff, within bounds.
func TestOutageBackoff(t *testing.T) {
	for name, c := range map[string]struct {
		policy      backoff.Policy
		least, most time.Duration
	}{
		"within":   {backoff.Constant(5 * time.Second), 5 * time.Second, 5 * time.Second},
		"none":     {backoff.Constant(0), 100 * time.Millisecond, 100 * time.Millisecond},
		"too long": {backoff.Constant(time.Hour), 30 * time.Second, 30 * time.Second},
		"growing":  {backoff.Exponential{Jitter: backoff.NoJitter}, time.Second, 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.Backoff = c.policy }))
				f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
					return &engine.BatchError{Outage: errBroken, Failed: map[int64]error{batch[0].ID: engine.ErrNotAttempted}}
				})
				f.storage.add(orders, "a")
				f.start(t)
				for range 1000 { // neither wakes nor polls shorten a wait
					f.Wake(engine.Wake{All: true})
					time.Sleep(time.Second)
				}
				var times []time.Duration
				for _, d := range f.relay.recorded() {
					times = append(times, d.at)
				}
				wantGrowing(t, times, c.least, c.most)
			})
		})
	}
}

// An outage that is partial: what got through is recorded.
func TestPartialOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
			e := &engine.BatchError{Outage: errBroken}
			for _, env := range batch[1:] {
				e.Fail(env.ID, engine.ErrNotAttempted)
			}
			return e
		})
		f.storage.add(orders, "a", "b", "a", "b")
		f.start(t)
		f.wantPending(t, 3)
		if s := f.States()[0]; s.Outage == nil {
			t.Error("the outage is not visible")
		}
		time.Sleep(20 * time.Second)
		f.wantPending(t, 0)
		f.wantUncharged(t)
	})
}

// Rule 5: the culprit among good messages is found although the relay can only
// say that it failed.
func TestPoisonIsChargedAndOthersFlow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts = 3 }))
		f.start(t)
		f.storage.add(orders, "a")
		f.Wake(engine.Wake{All: true})
		synctest.Wait()
		bad := f.storage.add(orders, "a", "bad", "b")[1]
		f.relay.set(func(_ context.Context, batch []engine.Envelope) error {
			if slices.ContainsFunc(batch, func(e engine.Envelope) bool { return e.ID == bad }) {
				return errBroken
			}
			return nil
		})
		behind := f.storage.add(orders, repeated("bad", 3)...)
		f.storage.add(orders, repeated("c", 500)...)
		f.Wake(engine.Wake{All: true})
		time.Sleep(100 * time.Millisecond)
		f.wantPending(t, 4)
		for range 200 { // traffic to compare it with
			f.storage.add(orders, "c", "")
			time.Sleep(time.Second)
		}
		if dead := f.storage.with("dead"); !slices.Equal(dead, []int64{bad}) {
			t.Fatalf("dead: %v, want %d", dead, bad)
		}
		if row := f.storage.row(bad); row.Attempts != 3 || row.LastError != "broken" {
			t.Errorf("dead after %d attempts with %q", row.Attempts, row.LastError)
		}
		for _, id := range behind {
			if f.storage.row(id) != nil {
				t.Errorf("message %d behind the dead one was not delivered", id)
			}
		}
	})
}

// C42
func TestOneFailureOfABatch(t *testing.T) {
	for name, after := range map[string]engine.AfterDead{"continue": engine.Continue, "hold the group": engine.HoldGroup} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				f := setup(t, 1, outbox(func(o *engine.OutboxConfig) { o.MaxAttempts, o.AfterDead = 3, after }))
				ids := f.storage.add(orders, "a", "b", "a", "b", "c")
				f.relay.set(naming(func(env engine.Envelope) error {
					switch env.ID {
					case ids[0]:
						return errBroken
					case ids[2]: // the relay keeps the order within the group
						if f.storage.row(ids[0]).status == "" {
							return engine.ErrNotAttempted
						}
					}
					return nil
				}))
				f.start(t)
				if got := f.storage.pending(); !slices.Equal(got, []int64{ids[0], ids[2]}) {
					t.Errorf("pending %v, want the group that failed", got)
				}
				if row := f.storage.row(ids[2]); row.Attempts != 0 {
					t.Errorf("the message behind was charged")
				}
				time.Sleep(time.Minute)
				if row := f.storage.row(ids[0]); row.status != "dead" || row.Attempts != 3 {
					t.Errorf("status %q after %d attempts, want dead after 3", row.status, row.Attempts)
				}
				want := 0
				if after == engine.HoldGroup {
					want = 1
				}
				f.wantPending(t, want)
			})
		})
	}
}

// C43
func TestNothingOvertakesARetry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 1)
		other := f.node()
		first := f.storage.add(orders, "a")[0]
		failed := false
		f.relay.set(naming(func(env engine.Envelope) error {
			if env.ID == first && !failed {
				failed = true
				return errBroken
			}
			return nil
		}))
		f.start(t)
		other.start(t)
		second := f.storage.add(orders, "a")[0]
		for range 100 {
			f.storage.add(orders, "other")
			f.Wake(engine.Wake{All: true})
			other.Wake(engine.Wake{All: true})
			time.Sleep(25 * time.Millisecond)
		}
		var got []string
		for _, d := range f.relay.recorded() {
			for i, id := range d.ids {
				if id == first || id == second {
					got = append(got, fmt.Sprintf("%d at %v, attempt %d", id, d.at.Round(100*time.Millisecond), d.attempts[i]))
				}
			}
		}
		want := []string{
			fmt.Sprintf("%d at 0s, attempt 0", first), fmt.Sprintf("%d at 2s, attempt 1", first), fmt.Sprintf("%d at 2s, attempt 0", second),
		}
		if !slices.Equal(got, want) {
			t.Errorf("delivered %q, want %q", got, want)
		}
	})
}

// C44
func TestRetriesFollowTheirScheduleAndSpread(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f := setup(t, 4, outbox(func(o *engine.OutboxConfig) { o.Backoff = backoff.Exponential{Initial: 500 * time.Millisecond} }))
		f.relay.set(naming(func(engine.Envelope) error { return errBroken }))
		var groups []string
		for i := range 200 {
			groups = append(groups, fmt.Sprint("group-", i))
		}
		ids := f.storage.add(orders, groups...)
		f.start(t)
		time.Sleep(3 * time.Second)

		calls := make(map[int64]int)
		for _, id := range f.relay.ids() {
			calls[id]++
		}
		due := make(map[time.Time]bool)
		for _, id := range ids {
			if calls[id] < 3 || calls[id] > 4 { // at 0, 0.5, 1.5 and 3.5 s, a fifth more or less
				t.Errorf("message %d was sent %d times in 3 s", id, calls[id])
			}
			due[f.storage.row(id).due] = true
		}
		if len(due) < 190 {
			t.Errorf("the next attempts of 200 messages are at %d times", len(due))
		}
		if _, fetches := f.storage.counts(); fetches > 4*200*4+20 {
			t.Errorf("%d fetches", fetches)
		}
		f.relay.set(nil)
		time.Sleep(5 * time.Second)
		f.wantPending(t, 0)
	})
}

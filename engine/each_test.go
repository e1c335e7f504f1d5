package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

var errBroken = errors.New("broken")

// batchOf makes messages of "group:number" or, without a group, "number".
func batchOf(names ...string) []Envelope {
	batch := make([]Envelope, len(names))
	for i, name := range names {
		group, _, grouped := strings.Cut(name, ":")
		if !grouped {
			group = ""
		}
		batch[i] = Envelope{ID: int64(i + 1), GroupKey: group, Type: name, Payload: []byte(name)}
	}
	return batch
}

// deliverEach runs an Each relay as the engine does, and sorts its answer.
func deliverEach(ctx context.Context, o Ordering, alive func(context.Context) error, batch []Envelope, relay Relay) outcome {
	if alive == nil {
		alive = func(context.Context) error { return nil }
	}
	ctx = withDelivery(ctx, delivery{ordering: o, alive: alive})
	c := OutboxConfig{Ordering: o}.withDefaults()
	return c.judge(batch, relay.Deliver(ctx, batch), time.Now())
}

// want compares an outcome with the types delivered and failed.
func (o *outcome) want(t *testing.T, batch []Envelope, delivered, failed string) {
	t.Helper()
	var gotDelivered, gotFailed []string
	for _, env := range batch {
		if slices.Contains(o.settlement.Delivered, env.ID) {
			gotDelivered = append(gotDelivered, env.Type)
		}
		if slices.ContainsFunc(o.settlement.Failed, func(f Failure) bool { return f.ID == env.ID }) {
			gotFailed = append(gotFailed, env.Type)
		}
	}
	if got := strings.Join(gotDelivered, " "); got != delivered {
		t.Errorf("delivered %q, want %q", got, delivered)
	}
	if got := strings.Join(gotFailed, " "); got != failed {
		t.Errorf("failed %q, want %q", got, failed)
	}
	if all := o.delivered() + o.charged() + o.notAttempted; all != len(batch) {
		t.Errorf("%d messages of %d are accounted for", all, len(batch))
	}
}

// failing fails the messages of the given types.
func failing(err error, types ...string) func(context.Context, Envelope) error {
	return func(_ context.Context, env Envelope) error {
		if slices.Contains(types, env.Type) {
			return err
		}
		return nil
	}
}

func TestEachFailure(t *testing.T) {
	t.Parallel()
	names := []string{"a:1", "b:1", "a:2", "3", "b:2", "4"}
	for name, c := range map[string]struct {
		ordering          Ordering
		fn                func(context.Context, Envelope) error
		delivered, failed string
	}{
		"none":                  {ByGroup, failing(nil), "a:1 b:1 a:2 3 b:2 4", ""},
		"head of a group":       {ByGroup, failing(errBroken, "a:1"), "b:1 3 b:2 4", "a:1"},
		"end of a group":        {ByGroup, failing(errBroken, "a:2"), "a:1 b:1 3 b:2 4", "a:2"},
		"without a group":       {ByGroup, failing(errBroken, "3"), "a:1 b:1 a:2 b:2 4", "3"},
		"all":                   {ByGroup, failing(errBroken, names...), "", "a:1 b:1 3 4"},
		"total":                 {Total, failing(errBroken, "a:2"), "a:1 b:1", "a:2"},
		"none promised":         {None, failing(errBroken, "a:1"), "b:1 a:2 3 b:2 4", "a:1"},
		"permanent":             {ByGroup, failing(Permanent(errBroken), "a:1"), "b:1 3 b:2 4", "a:1"},
		"not attempted":         {ByGroup, failing(ErrNotAttempted, "a:1"), "b:1 3 b:2 4", ""},
		"wrapped not attempted": {ByGroup, failing(fmt.Errorf("full: %w", ErrNotAttempted), "a:1"), "b:1 3 b:2 4", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			batch := batchOf(names...)
			out := deliverEach(t.Context(), c.ordering, nil, batch, Each(c.fn))
			out.want(t, batch, c.delivered, c.failed)
			if out.outage != nil {
				t.Errorf("outage %v, want none", out.outage)
			}
		})
	}
}

func TestEachUnavailableStopsSending(t *testing.T) {
	t.Parallel()
	batch := batchOf("a:1", "b:1", "b:2", "c:1", "2")
	var sent []string
	out := deliverEach(t.Context(), ByGroup, nil, batch, Each(func(_ context.Context, env Envelope) error {
		sent = append(sent, env.Type)
		if env.Type == "b:1" {
			return fmt.Errorf("send: %w", Unavailable(errBroken))
		}
		return nil
	}))
	out.want(t, batch, "a:1", "")
	if !errors.Is(out.outage, errBroken) {
		t.Errorf("outage %v, want what the function returned", out.outage)
	}
	if got := strings.Join(sent, " "); got != "a:1 b:1" {
		t.Errorf("sent %q, want nothing after the destination was found down", got)
	}
}

func TestEachKeepsGroupOrderUnderConcurrency(t *testing.T) {
	t.Parallel()
	const groups, perGroup, concurrency = 20, 10, 4
	var batch []Envelope
	for i := range groups * perGroup {
		batch = append(batch, Envelope{ID: int64(i + 1), GroupKey: fmt.Sprint(i % groups)})
	}
	synctest.Test(t, func(t *testing.T) {
		var (
			mu          sync.Mutex
			running, at int
			busy        = make(map[string]bool)
			last        = make(map[string]int64)
		)
		relay := Each(func(_ context.Context, env Envelope) error {
			mu.Lock()
			running++
			at = max(at, running)
			if busy[env.GroupKey] || last[env.GroupKey] >= env.ID {
				t.Errorf("message %d of group %s: busy %v, last %d", env.ID, env.GroupKey, busy[env.GroupKey], last[env.GroupKey])
			}
			busy[env.GroupKey], last[env.GroupKey] = true, env.ID
			mu.Unlock()
			time.Sleep(time.Millisecond)
			mu.Lock()
			running--
			busy[env.GroupKey] = false
			mu.Unlock()
			return nil
		}, Concurrency(concurrency))
		begun := time.Now()
		out := deliverEach(t.Context(), ByGroup, nil, batch, relay)
		if out.delivered() != len(batch) {
			t.Errorf("delivered %d of %d", out.delivered(), len(batch))
		}
		if at != concurrency {
			t.Errorf("%d groups side by side, want %d", at, concurrency)
		}
		if got, want := time.Since(begun), groups*perGroup/concurrency*time.Millisecond; got != want {
			t.Errorf("took %v, want %v", got, want)
		}
	})
}

func TestEachTotalIsOneSequence(t *testing.T) {
	t.Parallel()
	batch := batchOf("a:1", "1", "b:1", "2")
	var running atomic.Int32
	var sent []string
	out := deliverEach(t.Context(), Total, nil, batch, Each(func(_ context.Context, env Envelope) error {
		if running.Add(1) > 1 {
			t.Error("two messages side by side in a total order")
		}
		defer running.Add(-1)
		sent = append(sent, env.Type)
		runtime.Gosched()
		return nil
	}, Concurrency(8)))
	out.want(t, batch, "a:1 1 b:1 2", "")
	if got := strings.Join(sent, " "); got != "a:1 1 b:1 2" {
		t.Errorf("sent %q", got)
	}
}

func TestEachOutsideAnEngine(t *testing.T) {
	t.Parallel()
	batch := batchOf("a:1", "a:2", "b:1")
	err := Each(failing(errBroken, "a:1"), Concurrency(0), Timeout(-1)).Deliver(t.Context(), batch)
	failed, ok := errors.AsType[*BatchError](err)
	if !ok || len(failed.Failed) != 2 || !errors.Is(failed.Failed[1], errBroken) || !errors.Is(failed.Failed[2], ErrNotAttempted) {
		t.Errorf("got %v", err)
	}
}

func writeTo(m map[string]int) { m["a"] = 1 }

// C53
func TestEachPanics(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		fn   func()
		text string
	}{
		"string":  {func() { panic("out of cheese") }, "out of cheese"},
		"error":   {func() { panic(errBroken) }, "broken"},
		"nil map": {func() { writeTo(nil) }, "assignment to entry in nil map"},
		"goexit":  {runtime.Goexit, "Goexit"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			batch := batchOf("a:1", "b:1", "a:2", "b:2")
			out := deliverEach(t.Context(), ByGroup, nil, batch, Each(func(_ context.Context, env Envelope) error {
				if env.Type == "a:1" {
					c.fn()
				}
				return nil
			}, Concurrency(2)))
			out.want(t, batch, "b:1 b:2", "a:1")
			text := out.settlement.Failed[0].Error
			if !strings.Contains(text, c.text) {
				t.Errorf("error text %q does not say %q", text, c.text)
			}
			if name != "goexit" && !strings.Contains(text, "each_test.go") {
				t.Errorf("error text %q does not tell where", text)
			}
		})
	}
}

// C50
func TestEachTimeoutFailsTheMessageAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		batch := batchOf("a:1", "b:1", "a:2")
		out := deliverEach(ctx, ByGroup, nil, batch, Each(func(ctx context.Context, env Envelope) error {
			if env.Type != "a:1" {
				return nil
			}
			<-ctx.Done()
			return context.Cause(ctx)
		}, Timeout(time.Second)))
		out.want(t, batch, "b:1", "a:1")
		if text := out.settlement.Failed[0].Error; text != context.DeadlineExceeded.Error() {
			t.Errorf("error text %q", text)
		}
	})
}

func TestEachStartsNoCallThatCannotFinish(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		options   []EachOption
		takes     time.Duration
		delivered string
		took      time.Duration
	}{
		"default is half": {nil, 3 * time.Second, "1 2", 6 * time.Second},
		"short":           {[]EachOption{Timeout(time.Second)}, time.Second, "1 2 3 4 5", 5 * time.Second},
		"most of it":      {[]EachOption{Timeout(4 * time.Second)}, 3 * time.Second, "1 2 3", 9 * time.Second},
		"too long":        {[]EachOption{Timeout(time.Hour)}, time.Second, "1 2", 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				batch := batchOf("1", "2", "3", "4", "5")
				begun := time.Now()
				out := deliverEach(ctx, ByGroup, nil, batch, Each(func(ctx context.Context, _ Envelope) error {
					select {
					case <-time.After(c.takes):
						return nil
					case <-ctx.Done():
						return ctx.Err()
					}
				}, c.options...))
				out.want(t, batch, c.delivered, "")
				if took := time.Since(begun); took != c.took {
					t.Errorf("took %v, want %v", took, c.took)
				}
				if out.outage != nil {
					t.Errorf("outage %v, but messages got through", out.outage)
				}
			})
		})
	}
}

// C22
func TestEachStopsWhenOwnershipIsLost(t *testing.T) {
	t.Parallel()
	batch := batchOf("a:1", "a:2", "a:3", "b:1")
	var calls int
	alive := func(context.Context) error {
		if calls++; calls > 2 {
			return ErrOwnershipLost
		}
		return nil
	}
	out := deliverEach(t.Context(), ByGroup, alive, batch, Each(failing(nil)))
	out.want(t, batch, "a:1 a:2", "")
}

// C51
func TestEachInterruptedKeepsWhatItDelivered(t *testing.T) {
	t.Parallel()
	stop := errors.New("stop")
	for name, during := range map[string]bool{"between two calls": false, "during a call": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancelCause(t.Context())
			batch := batchOf("a:1", "a:2", "a:3", "b:1")
			out := deliverEach(ctx, ByGroup, nil, batch, Each(func(ctx context.Context, env Envelope) error {
				if env.Type != "a:2" {
					return nil
				}
				cancel(stop)
				if during {
					return ctx.Err()
				}
				return nil
			}))
			if during {
				out.want(t, batch, "a:1", "")
			} else {
				out.want(t, batch, "a:1 a:2", "")
			}
		})
	}
}

func TestEachAllInterruptedSaysWhy(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errBroken)
	batch := batchOf("a:1", "b:1")
	out := deliverEach(ctx, ByGroup, nil, batch, Each(func(context.Context, Envelope) error {
		t.Error("a call was started after the end of the context")
		return nil
	}))
	out.want(t, batch, "", "")
	if out.outage == nil {
		t.Error("nothing was attempted and there is no outage: the worker would spin")
	}
}

package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// moody is a relay that refuses for good while it is down, and remembers what
// it delivers otherwise.
type moody struct {
	*recorder
	down atomic.Bool
}

func newMoody() *moody { return &moody{recorder: newRecorder()} }

func (m *moody) relay() outbox.Relay {
	return outbox.Each(func(ctx context.Context, e outbox.Envelope) error {
		if m.down.Load() && e.Type != "healthy" {
			return outbox.Permanent(errors.New("refused"))
		}
		return m.Deliver(ctx, []outbox.Envelope{e})
	})
}

// mortal is an outbox whose messages die of the first refusal.
func mortal(m *moody, change func(*outbox.Outbox)) outbox.Config {
	return one(func(o *outbox.Outbox) {
		o.Relay, o.MaxAttempts = m.relay(), 5
		if change != nil {
			change(o)
		}
	})
}

// killAll has everything that is due refused until nothing is.
func killAll(t testing.TB, in *outbox.Instance, m *moody) {
	t.Helper()
	m.down.Store(true)
	defer m.down.Store(false)
	for mustStats(t, in).Due > 0 {
		drain(t, in)
	}
}

func mustStats(t testing.TB, in *outbox.Instance) outbox.OutboxStats {
	t.Helper()
	s, err := in.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.Outboxes[0]
}

func listed(t testing.TB, in *outbox.Instance, q outbox.Query) []outbox.MessageInfo {
	t.Helper()
	q.Limit = 1000
	page, err := in.Messages(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return page.Messages
}

// calls are all methods that administer one outbox.
func calls(in *outbox.Instance) map[string]func(context.Context, string) error {
	where := outbox.Filter{MinAttempts: 1}
	count := func(_ int, err error) error { return err }
	return map[string]func(context.Context, string) error{
		"Messages": func(ctx context.Context, o string) error {
			_, err := in.Messages(ctx, outbox.Query{Outbox: o})
			return err
		},
		"RetryDead":      func(ctx context.Context, o string) error { return count(in.RetryDead(ctx, o, 1)) },
		"RetryDeadWhere": func(ctx context.Context, o string) error { return count(in.RetryDeadWhere(ctx, o, where)) },
		"RetryNow":       func(ctx context.Context, o string) error { return count(in.RetryNow(ctx, o, where)) },
		"MarkDead":       func(ctx context.Context, o string) error { return count(in.MarkDead(ctx, o, 1)) },
		"Discard":        func(ctx context.Context, o string) error { return count(in.Discard(ctx, o, 1)) },
		"DiscardWhere":   func(ctx context.Context, o string) error { return count(in.DiscardWhere(ctx, o, where)) },
		"Pause":          in.Pause,
		"Resume":         in.Resume,
		"Repartition":    func(ctx context.Context, o string) error { return in.Repartition(ctx, o, 2) },
	}
}

func TestAdministrationNeedsTables(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		in := install(t, open(), one(func(o *outbox.Outbox) { o.DeadRetention = time.Hour }))
		for what, call := range calls(in) {
			if err := call(t.Context(), "orders"); !errors.Is(err, outbox.ErrNotMigrated) {
				t.Errorf("%s: %v, want ErrNotMigrated", what, err)
			}
			if err := call(t.Context(), "nowhere"); !errors.Is(err, outbox.ErrUnknownOutbox) {
				t.Errorf("%s of an unknown outbox: %v, want ErrUnknownOutbox", what, err)
			}
		}
		if _, err := in.Stats(t.Context()); !errors.Is(err, outbox.ErrNotMigrated) {
			t.Errorf("Stats: %v, want ErrNotMigrated", err)
		}
		if _, err := in.Prune(t.Context()); !errors.Is(err, outbox.ErrNotMigrated) {
			t.Errorf("Prune: %v, want ErrNotMigrated", err)
		}
	})
}

func TestAdministrationNeedsThePlugin(t *testing.T) {
	t.Parallel()
	in, err := outbox.New(one(nil))
	if err != nil {
		t.Fatal(err)
	}
	for what, call := range calls(in) {
		if err := call(t.Context(), "orders"); !errors.Is(err, outbox.ErrNotInstalled) {
			t.Errorf("%s: %v, want ErrNotInstalled", what, err)
		}
	}
}

// An instance that was never started administers, and refuses a filter that
// was forgotten.
func TestAdministrationNeedsNoStart(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		in := setUp(t, db, one(nil))
		publish(t, db, message("a"), message("b"))
		for what, call := range calls(in) {
			if what == "Discard" || what == "MarkDead" {
				continue
			}
			if err := call(t.Context(), "orders"); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		for what, call := range map[string]func(context.Context, string, outbox.Filter) (int, error){
			"RetryDeadWhere": in.RetryDeadWhere, "RetryNow": in.RetryNow, "DiscardWhere": in.DiscardWhere,
		} {
			if n, err := call(t.Context(), "orders", outbox.Filter{}); n != 0 || err == nil || !strings.Contains(err.Error(), "filter is empty") {
				t.Errorf("%s of an empty filter: %d, %v", what, n, err)
			}
		}
		if n, err := in.Discard(t.Context(), "orders"); n != 0 || err != nil {
			t.Errorf("Discard of nothing: %d, %v", n, err)
		}
		if n := len(listed(t, in, outbox.Query{})); n != 2 { // in the default outbox
			t.Errorf("there are %d messages, want 2", n)
		}
	})
}

// C46: after an outage that killed everything, what is dead can be counted,
// listed and replayed by group, by age and altogether, each message once and as
// it was.
func TestReplayAfterOutage(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		const groups, each = 20, 25
		db, m := open(), newMoody()
		in := setUp(t, db, mortal(m, func(o *outbox.Outbox) { o.Partitions = 4 }))
		want := make(map[string]string)
		for i := range each {
			var events []outbox.Event
			for g := range groups {
				id := fmt.Sprintf("%d/%d", g, i)
				events = append(events, outbox.Message{Type: "t", GroupKey: fmt.Sprint(g), Payload: []byte(id), Headers: map[string]string{"id": id}})
			}
			publish(t, db, events...)
		}
		for _, info := range listed(t, in, outbox.Query{Payload: true}) {
			want[string(info.Payload)] = fmt.Sprint(info.ID, info.GroupKey, info.Headers)
		}
		killAll(t, in, m)
		if s := mustStats(t, in); s.Dead != groups*each || s.Due != 0 || len(m.all()) != 0 {
			t.Fatalf("%d dead, %d due, %d delivered", s.Dead, s.Due, len(m.all()))
		}
		if dead := listed(t, in, outbox.Query{Filter: outbox.Filter{Status: outbox.Dead, ErrorContains: "refused"}}); len(dead) != groups*each {
			t.Errorf("%d dead messages are listed", len(dead))
		}

		replay := func(f outbox.Filter, want int) {
			t.Helper()
			if n, err := in.RetryDeadWhere(t.Context(), "orders", f); err != nil || n != want {
				t.Fatalf("RetryDeadWhere %+v: %d, %v, want %d", f, n, err, want)
			}
			if n := drain(t, in); n != want {
				t.Errorf("%d messages delivered after %+v, want %d", n, f, want)
			}
		}
		replay(outbox.Filter{GroupKey: "7"}, each)
		replay(outbox.Filter{OlderThan: time.Hour}, 0)
		replay(outbox.Filter{Status: outbox.Dead}, (groups-1)*each)

		next := make(map[string]int)
		for _, e := range m.all() {
			if got := fmt.Sprint(e.ID, e.GroupKey, e.Headers); want[string(e.Payload)] != got {
				t.Errorf("%q was delivered as %s, want %s once", e.Payload, got, want[string(e.Payload)])
			}
			delete(want, string(e.Payload))
			if string(e.Payload) != fmt.Sprintf("%s/%d", e.GroupKey, next[e.GroupKey]) {
				t.Errorf("%q comes as number %d of its group", e.Payload, next[e.GroupKey])
			}
			next[e.GroupKey]++
		}
		if len(want) > 0 {
			t.Errorf("%d messages were not delivered", len(want))
		}
	})
}

// C47: what is replayed goes before what its group has not begun, in its own
// order.
func TestReplayGoesFirst(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db, m := open(), newMoody()
		in := setUp(t, db, mortal(m, nil))
		publish(t, db, grouped("A1", "A"), grouped("A2", "A"), grouped("B1", "B"), grouped("A3", "A"), grouped("B2", "B"), grouped("A4", "A"), grouped("A5", "A"))
		killAll(t, in, m)
		if err := in.Pause(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		publish(t, db, grouped("A6", "A"))
		if n, err := in.RetryDeadWhere(t.Context(), "orders", outbox.Filter{Status: outbox.Dead}); n != 7 || err != nil {
			t.Fatalf("retried %d, %v", n, err)
		}
		if n := drain(t, in); n != 0 {
			t.Errorf("%d messages delivered by a paused outbox", n)
		}
		if err := in.Resume(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		drain(t, in)
		byGroup := make(map[string][]string)
		for _, e := range m.all() {
			byGroup[e.GroupKey] = append(byGroup[e.GroupKey], e.Type)
		}
		if a, b := byGroup["A"], byGroup["B"]; !slices.Equal(a, []string{"A1", "A2", "A3", "A4", "A5", "A6"}) || !slices.Equal(b, []string{"B1", "B2"}) {
			t.Errorf("delivered %v and %v", a, b)
		}
	})
}

// C47: two replays at once, while the worker delivers.
func TestReplaysWhileRelaying(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		const n, groups = 3000, 11
		db, m := open(), newMoody()
		c := mortal(m, func(o *outbox.Outbox) { o.Partitions = 3 })
		c.PollInterval = never
		in := setUp(t, db, c)
		events := make([]outbox.Event, n)
		for i := range events {
			events[i] = grouped(fmt.Sprint(i), fmt.Sprint(i%groups))
		}
		var ids []int64
		inTx(t, db, func(tx *gorm.DB) error {
			stored, err := outbox.AddReturning(tx, events...)
			for _, e := range stored {
				ids = append(ids, e.ID)
			}
			return err
		})
		if killed, err := in.MarkDead(t.Context(), "orders", ids...); killed != n || err != nil {
			t.Fatalf("marked %d dead, %v", killed, err)
		}
		start(t, in)

		var retried atomic.Int64
		var replays sync.WaitGroup
		for range 2 {
			replays.Go(func() {
				count, err := in.RetryDeadWhere(t.Context(), "orders", outbox.Filter{Status: outbox.Dead})
				if err != nil {
					t.Error(err)
				}
				retried.Add(int64(count))
			})
		}
		replays.Wait()
		last := make(map[string]int64)
		for _, e := range m.wait(t, n) {
			if e.ID <= last[e.GroupKey] {
				t.Errorf("message %d of group %s comes after %d", e.ID, e.GroupKey, last[e.GroupKey])
			}
			last[e.GroupKey] = e.ID
		}
		if retried.Load() != n || len(m.all()) != n {
			t.Errorf("%d retried, %d delivered, want %d", retried.Load(), len(m.all()), n)
		}
	})
}

// C42: a dead head does not hold its group, unless that is what AfterDead says:
// then the group can be seen, and released by retrying or discarding the head.
func TestParkedGroups(t *testing.T) {
	t.Parallel()
	release := map[string]struct {
		call func(context.Context, *outbox.Instance, int64) (int, error)
		then []string
	}{
		"retry": {func(ctx context.Context, in *outbox.Instance, id int64) (int, error) {
			return in.RetryDead(ctx, "orders", id)
		}, []string{"A1", "A2"}},
		"discard": {func(ctx context.Context, in *outbox.Instance, id int64) (int, error) {
			return in.Discard(ctx, "orders", id)
		}, []string{"A2"}},
	}
	for how, r := range release {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
				db, m := open(), newMoody()
				in := setUp(t, db, mortal(m, func(o *outbox.Outbox) { o.AfterDead = outbox.HoldGroup }))
				m.down.Store(true)
				publish(t, db, grouped("A1", "A"), outbox.Message{Type: "healthy", GroupKey: "B"}, grouped("A2", "A"))
				drain(t, in)
				m.down.Store(false)
				drain(t, in)
				if got := m.types(); !slices.Equal(got, []string{"healthy"}) {
					t.Fatalf("delivered %v", got)
				}
				s := mustStats(t, in)
				if s.BlockedGroups != 1 || len(s.Blocked) != 1 || s.Blocked[0].GroupKey != "A" || s.Blocked[0].LastError != "refused" || s.Unattended != 0 {
					t.Fatalf("stats are %+v", s)
				}
				if n, err := r.call(t.Context(), in, s.Blocked[0].ID); n != 1 || err != nil {
					t.Fatalf("released %d, %v", n, err)
				}
				drain(t, in)
				if got := m.types()[1:]; !slices.Equal(got, r.then) {
					t.Errorf("after the release: %v, want %v", got, r.then)
				}
			})
		})
	}
	t.Run("continue", func(t *testing.T) {
		t.Parallel()
		db, m := testdb.SQLite(t).Gorm(t), newMoody()
		in := setUp(t, db, mortal(m, nil))
		publish(t, db, grouped("A1", "A"), outbox.Message{Type: "healthy", GroupKey: "A"})
		killAll(t, in, m)
		if got := m.types(); !slices.Equal(got, []string{"healthy"}) {
			t.Errorf("delivered %v", got)
		}
		if s := mustStats(t, in); s.BlockedGroups != 0 || s.Dead != 1 {
			t.Errorf("stats are %+v", s)
		}
	})
}

// A pause is stored: it holds the workers of every node, and those that have
// nothing else to wake them go on when another node resumes.
func TestPauseIsForTheCluster(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		c, r := relayed(nil)
		c.PollInterval = 50 * time.Millisecond // SQLite has no push
		worker := setUp(t, open(), c)
		db := open()
		other := setUp(t, db, one(nil))
		if err := other.Pause(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		publish(t, db, message("a"))
		if n := drain(t, worker); n != 0 {
			t.Errorf("%d messages delivered while paused", n)
		}
		start(t, worker)
		s := mustStats(t, worker)
		if s.PausedAt.IsZero() || s.Unattended != 0 || s.Due != 1 {
			t.Errorf("stats are %+v", s)
		}
		if n := len(r.all()); n != 0 {
			t.Errorf("%d messages delivered while paused", n)
		}
		if err := other.Resume(t.Context(), "orders"); err != nil {
			t.Fatal(err)
		}
		r.wait(t, 1)
	})
}

func TestResumeWakesOtherNodes(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	c, r := relayed(nil)
	c.PollInterval = never
	worker := setUp(t, pg.Gorm(t), c)
	db := pg.Gorm(t)
	other := setUp(t, db, one(nil))
	if err := other.Pause(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	publish(t, db, message("a"))
	start(t, worker)
	pushes(t, worker)
	if err := other.Resume(t.Context(), "orders"); err != nil {
		t.Fatal(err)
	}
	r.wait(t, 1)
}

// pushes waits until the worker hears of other nodes.
func pushes(t testing.TB, in *outbox.Instance) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		s, err := in.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Push == "push" {
			return
		}
	}
	t.Fatal("there is no push")
}

// C48: pruning goes by small batches, deletes what is past its retention and
// nothing else, and two pruners share the work.
func TestPrune(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		const dead = 2500
		db := open()
		c := one(func(o *outbox.Outbox) { o.DeadRetention = time.Microsecond })
		c.Outboxes = append(c.Outboxes, outbox.Outbox{Name: "kept"})
		c.DefaultOutbox = outbox.NoDefault
		in := setUp(t, db, c)
		mark := func(name string, n int) {
			var ids []int64
			events := make([]outbox.Event, n)
			for i := range events {
				events[i] = outbox.Message{Outbox: name, Type: "t"}
			}
			inTx(t, db, func(tx *gorm.DB) error {
				stored, err := outbox.AddReturning(tx, events...)
				for _, e := range stored {
					ids = append(ids, e.ID)
				}
				return err
			})
			if got, err := in.MarkDead(t.Context(), name, ids...); got != n || err != nil {
				t.Fatalf("marked %d dead, %v", got, err)
			}
		}
		mark("orders", dead)
		mark("kept", 3)
		publish(t, db, outbox.Message{Outbox: "orders", Type: "pending"})

		var pruned atomic.Int64
		var pruners sync.WaitGroup
		for range 2 {
			pruners.Go(func() {
				n, err := in.Prune(t.Context())
				if err != nil {
					t.Error(err)
				}
				pruned.Add(int64(n))
			})
		}
		pruners.Wait()
		if pruned.Load() != dead {
			t.Errorf("%d messages pruned, want %d", pruned.Load(), dead)
		}
		if n := len(listed(t, in, outbox.Query{Outbox: "orders"})); n != 1 {
			t.Errorf("%d messages are left, want the pending one", n)
		}
		if n := len(listed(t, in, outbox.Query{Outbox: "kept"})); n != 3 {
			t.Errorf("%d messages are left of 3 that are to be kept", n)
		}
	})
}

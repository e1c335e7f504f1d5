package dialect

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

func (t adminTest) ensure(partitions int) {
	t.Helper()
	facts := []OutboxFacts{{Name: "orders", Partitions: partitions}, {Name: "other", Ordering: engine.Total}}
	if err := t.EnsureOutboxes(t.Context(), facts); err != nil {
		t.Error(err)
	}
}

func (t adminTest) facts(outbox string) (r recorded) {
	t.Helper()
	err := t.syntax.read(t.Context(), false, func(tx engine.Tx) error {
		known, err := t.recorded(t.Context(), tx, t.outboxes[outbox])
		r = known[outbox]
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// C56: the count is a fact in the database. Old nodes of a rolling deploy do
// not bring back what a newer one has replaced; only an operator does.
func TestSetPartitions(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		if _, err := t.SetPartitions(t.Context(), "orders", 2, false); err == nil {
			t.Error("an outbox that is not recorded got a count")
		}
		t.ensure(4)
		for i, step := range []struct {
			n          int
			explicit   bool
			want       PartitionChange
			superseded string
		}{
			{4, false, PartitionChange{Current: 4}, ""},
			{8, false, PartitionChange{Current: 8, Changed: true}, "4"},
			{4, false, PartitionChange{Current: 8, Superseded: true}, "4"},
			{16, false, PartitionChange{Current: 16, Changed: true}, "4 8"},
			{8, false, PartitionChange{Current: 16, Superseded: true}, "4 8"},
			{4, true, PartitionChange{Current: 4, Changed: true}, "8 16"},
			{4, true, PartitionChange{Current: 4}, "8 16"},
			{16, false, PartitionChange{Current: 4, Superseded: true}, "8 16"},
			{2, false, PartitionChange{Current: 2, Changed: true}, "8 16 4"},
		} {
			got, err := t.SetPartitions(t.Context(), "orders", step.n, step.explicit)
			r := t.facts("orders")
			if err != nil || got != step.want || r.partitions != got.Current || formatCounts(r.superseded) != step.superseded {
				t.Errorf("step %d: got %+v, %v with %+v recorded; want %+v and %q", i, got, err, r, step.want, step.superseded)
			}
		}
		t.ensure(32)
		if r := t.facts("orders"); r.partitions != 2 || r.ordering != "by_group" {
			t.Errorf("recording the outbox again made it %+v", r)
		}
		if r := t.facts("other"); r.partitions != 1 || r.ordering != "total" {
			t.Errorf("the other outbox is %+v", r)
		}
	})
}

// C56: several nodes start at once.
func TestNodesStartAtOnce(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		var changed atomic.Int32
		var nodes sync.WaitGroup
		for range 8 {
			nodes.Go(func() {
				t.ensure(0)
				change, err := t.SetPartitions(t.Context(), "orders", 8, false)
				if err != nil || change.Current != 8 {
					t.Errorf("got %+v, %v", change, err)
				}
				if change.Changed {
					changed.Add(1)
				}
			})
		}
		nodes.Wait()
		if r := t.facts("orders"); changed.Load() != 1 || formatCounts(r.superseded) != "1" {
			t.Errorf("%d nodes changed the count; recorded is %+v", changed.Load(), r)
		}
	})
}

func TestPauseIsStored(t *testing.T) {
	t.Parallel()
	administer(t, func(t adminTest) {
		pause := func() time.Time {
			t.Helper()
			if err := t.Pause(t.Context(), "orders"); err != nil {
				t.Fatal(err)
			}
			return t.facts("orders").pausedAt
		}
		since := pause() // not recorded yet
		if since.IsZero() || !pause().Equal(since) {
			t.Errorf("paused since %v, then %v", since, t.facts("orders").pausedAt)
		}
		t.ensure(4)
		if r := t.facts("orders"); !r.pausedAt.Equal(since) {
			t.Errorf("recording the outbox made it %+v", r)
		}
		for range 2 {
			if err := t.Resume(t.Context(), "orders"); err != nil {
				t.Fatal(err)
			}
		}
		if r := t.facts("orders"); !r.pausedAt.IsZero() {
			t.Errorf("after resume it is %+v", r)
		}
	})
}

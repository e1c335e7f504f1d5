package storagetest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var concurrentTests = []test{
	{"publishers and workers: each message once, groups in order", concurrentDelivery},
	{"workers beside a change of the partition count", concurrentRemap},
}

// journal records deliveries as a relay sees them.
type journal struct {
	mu     sync.Mutex
	groups map[string][]string // what was delivered, by group
	count  int
	want   int
	done   chan struct{} // closed when want messages were delivered
}

func newJournal(want int) *journal {
	return &journal{groups: make(map[string][]string), want: want, done: make(chan struct{})}
}

func (j *journal) record(e engine.Envelope) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.groups[e.GroupKey] = append(j.groups[e.GroupKey], e.Type)
	if j.count++; j.count == j.want {
		close(j.done)
	}
}

const (
	publishers   = 4
	perPublisher = 30
	groupsOfEach = 3
)

// publish adds messages of the publisher's own groups, each in a transaction
// of its own. Every fifth is first added in one that is rolled back.
func publish(f *fixture, publisher int) {
	for i := range perPublisher {
		row := message(fmt.Sprintf("%d-%d", publisher, i%groupsOfEach), fmt.Sprint(i))
		if i%5 == 0 {
			tx := f.Begin(f.T)
			_, err := f.Storage.Insert(f.ctx, tx, []engine.Row{row}, false)
			if err := errors.Join(err, tx.Rollback()); err != nil {
				f.Errorf("publish in vain: %v", err)
			}
		}
		tx := f.Begin(f.T)
		_, err := f.Storage.Insert(f.ctx, tx, []engine.Row{row}, i%2 == 0)
		if err != nil {
			_ = tx.Rollback()
		} else {
			err = tx.Commit()
		}
		if err != nil {
			f.Errorf("publish: %v", err)
		}
	}
}

// work delivers one batch of the lane. A message whose number ends in 7 fails
// once. Where messages lie in lanes of another partition count it moves them: a
// publisher may have read the old count before it was changed and add late.
func work(f *fixture, storage engine.Storage, lane engine.Lane, j *journal) error {
	stray := false
	err := storage.WithPartition(f.ctx, lane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, engine.Query{Limit: 7, MaxBytes: 1 << 20})
		if err != nil {
			return err
		}
		stray = page.State == engine.PageStray
		var s engine.Settlement
		failed := make(map[string]bool)
		for _, e := range page.Envelopes {
			switch {
			case failed[e.GroupKey]:
			case e.Attempts == 0 && strings.HasSuffix(e.Type, "7"):
				failed[e.GroupKey] = true
				s.Failed = append(s.Failed, engine.Failure{ID: e.ID, Delay: time.Millisecond, Error: "refused"})
			default:
				j.record(e)
				s.Delivered = append(s.Delivered, e.ID)
			}
		}
		c.Settle(s)
		return nil
	})
	if err == nil && stray {
		_, _, err = storage.Remap(f.ctx, lane.Outbox, 1000)
	}
	return err
}

// worker works on lane after lane, as long as the journal is incomplete. It
// learns the partition count from the storage.
func worker(f *fixture, storage engine.Storage, j *journal) {
	for {
		all, err := storage.Probe(f.ctx, []string{Orders})
		if err != nil {
			f.Errorf("probe: %v", err)
			return
		}
		n := all[Orders].Partitions
		for p := range n {
			select {
			case <-j.done:
				return
			case <-f.ctx.Done():
				return
			default:
			}
			err := work(f, storage, engine.Lane{Outbox: Orders, Partition: p, Partitions: n}, j)
			if err != nil && !errors.Is(err, engine.ErrBusy) {
				f.Errorf("work: %v", err)
				return
			}
		}
	}
}

// deliver runs publishers and the workers of two nodes, and beside them, until
// everything was delivered, meanwhile. It checks the journal.
func deliver(f *fixture, meanwhile func()) {
	j := newJournal(publishers * perPublisher)
	var wg sync.WaitGroup
	for _, storage := range []engine.Storage{f.Storage, f.Peer} {
		for range 2 {
			wg.Go(func() { worker(f, storage, j) })
		}
	}
	for p := range publishers {
		wg.Go(func() { publish(f, p) })
	}
	meanwhile()
	wg.Wait()
	if len(j.groups) != publishers*groupsOfEach {
		f.Errorf("delivered %d groups, want %d", len(j.groups), publishers*groupsOfEach)
	}
	for group, got := range j.groups {
		_, first, _ := strings.Cut(group, "-")
		start, _ := strconv.Atoi(first)
		var want []string
		for i := start; i < perPublisher; i += groupsOfEach {
			want = append(want, fmt.Sprint(i))
		}
		wantEqual(f, "deliveries in group "+group, got, want)
	}
}

func concurrentDelivery(f *fixture) {
	f.SetPartitions(f.T, Orders, 2)
	deliver(f, func() {})
}

// C56
func concurrentRemap(f *fixture) {
	deliver(f, func() {
		for _, n := range []int{3, 1, 2} {
			f.SetPartitions(f.T, Orders, n)
			for more := true; more; {
				var err error
				_, more, err = f.Storage.Remap(f.ctx, Orders, 5)
				f.must("remap", err)
			}
		}
	})
}

package storagetest

import (
	"fmt"
	"sync"
	"time"

	"github.com/gormoutbox/outbox/engine"
)

var pruneTests = []test{
	{"only what is past its retention goes", pruneRetention},
	{"the limit bounds a call", pruneLimit},
	{"other outboxes are left alone", pruneOutbox},
	{"pending messages are never pruned", prunePending},
	{"two pruners do not disturb each other", pruneTogether},
}

func (f *fixture) prune(q engine.PruneQuery) int {
	f.Helper()
	q.Outbox = Orders
	n, err := f.Storage.Prune(f.ctx, q)
	f.must("prune", err)
	if n > q.Limit {
		f.Errorf("pruned %d, limit %d", n, q.Limit)
	}
	return n
}

// finished adds delivered and dead messages.
func (f *fixture) finished(delivered, dead int) {
	f.Helper()
	var rows []engine.Row
	for i := range delivered + dead {
		rows = append(rows, message("", fmt.Sprint(i)))
	}
	id := f.add(rows...)
	f.settle(engine.Settlement{Delivered: id[:delivered], Keep: true})
	f.kill(id[delivered:]...)
}

func pruneRetention(f *fixture) {
	f.finished(2, 3)
	if n := f.prune(engine.PruneQuery{Delivered: time.Hour, Dead: time.Hour, Limit: 100}); n != 0 {
		f.Errorf("pruned %d messages that are younger than an hour", n)
	}
	if n := f.prune(engine.PruneQuery{Delivered: -1, Dead: -1, Limit: 100}); n != 0 {
		f.Errorf("pruned %d messages that are to stay for ever", n)
	}
	if n := f.prune(engine.PruneQuery{Delivered: 0, Dead: time.Hour, Limit: 100}); n != 2 {
		f.Errorf("pruned %d delivered messages, want 2", n)
	}
	if n := f.prune(engine.PruneQuery{Delivered: time.Hour, Dead: 0, Limit: 100}); n != 3 {
		f.Errorf("pruned %d dead messages, want 3", n)
	}
}

// C48
func pruneLimit(f *fixture) {
	f.finished(4, 4)
	total, calls := 0, 0
	for {
		n := f.prune(engine.PruneQuery{Limit: 3})
		if n == 0 {
			break
		}
		total += n
		calls++
	}
	if total != 8 || calls < 3 {
		f.Errorf("pruned %d messages in %d calls, want 8 in at least 3", total, calls)
	}
}

func pruneOutbox(f *fixture) {
	row := message("", "a")
	row.Outbox = Mails
	id := f.add(row)
	f.must("settle", f.Storage.Settle(f.ctx, Mails, engine.Settlement{Delivered: id, Keep: true}))
	if n := f.prune(engine.PruneQuery{Limit: 10}); n != 0 {
		f.Errorf("pruned %d messages of another outbox", n)
	}
	n, err := f.Storage.Prune(f.ctx, engine.PruneQuery{Outbox: Mails, Limit: 10})
	f.must("prune", err)
	if n != 1 {
		f.Errorf("pruned %d, want 1", n)
	}
}

// C46
func prunePending(f *fixture) {
	id := f.add(messages("g", "failed", "ready")...)
	f.fail(0, id[0])
	f.add(delayed("g", "delayed", time.Hour))
	if n := f.prune(engine.PruneQuery{Limit: 10}); n != 0 {
		f.Errorf("pruned %d pending messages", n)
	}
	wantEqual(f, "drained", drain(f, query()), []string{"failed", "ready"})
}

// C48
func pruneTogether(f *fixture) {
	f.finished(300, 0)
	var wg sync.WaitGroup
	counts := make([]int, 2)
	for i, storage := range []engine.Storage{f.Storage, f.Peer} {
		wg.Go(func() {
			for range 10 {
				n, err := storage.Prune(f.ctx, engine.PruneQuery{Outbox: Orders, Dead: -1, Limit: 20})
				if err != nil {
					f.Errorf("prune: %v", err)
				}
				counts[i] += n
			}
		})
	}
	wg.Wait()
	rest := 0
	for n := f.prune(engine.PruneQuery{Limit: 100}); n > 0; n = f.prune(engine.PruneQuery{Limit: 100}) {
		rest += n
	}
	if total := counts[0] + counts[1] + rest; total != 300 {
		f.Errorf("pruned %v and then %d messages, want 300 together", counts, rest)
	}
}

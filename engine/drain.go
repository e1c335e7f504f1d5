package engine

import (
	"context"
	"fmt"
	"slices"
	"sync"
)

// DrainResult is what a drain came to.
type DrainResult struct {
	Delivered int // messages
	Failed    int // attempts that were charged
	Waiting   int // messages still to be delivered: blocked, delayed or not attempted
}

// Drain delivers what is due in the given outboxes, or in all, once, and
// returns when nothing is ready any more: what failed waits for its retry,
// also where that is due before the drain ends, and an outbox in outage is
// left. It needs no Start, and shares the partitions with running workers,
// here and elsewhere. When ctx ends it stops like Stop, settles, and returns
// ctx's error with what it did; and an error when the storage fails again and
// again. Waiting is left to the caller, who can ask the database.
func (e *Engine) Drain(ctx context.Context, outboxes ...string) (DrainResult, error) {
	if len(outboxes) == 0 {
		outboxes = e.names()
	}
	release, err := e.excludeUnlessRunning(ctx)
	if err != nil {
		return DrainResult{}, fmt.Errorf("drain: %w", err)
	}
	d := &drain{scope: newScope(ctx), outboxes: outboxes}
	defer d.scope.end()
	defer context.AfterFunc(ctx, func() { d.scope.endHard(context.Cause(ctx)) })()
	for again := true; again && err == nil; {
		again, err = d.round(ctx, e)
	}
	if released := release(); err == nil {
		err = released
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return d.result, fmt.Errorf("drain: %w", err)
	}
	return d.result, nil
}

// excludeUnlessRunning takes the exclusive right to relay, which an engine
// that runs has already.
func (e *Engine) excludeUnlessRunning(ctx context.Context) (release func() error, err error) {
	e.mu.Lock()
	running := e.run != nil
	e.mu.Unlock()
	if running {
		return func() error { return nil }, nil
	}
	return e.exclude(ctx)
}

// drain is one call of Drain.
type drain struct {
	scope    *scope
	outboxes []string

	mu     sync.Mutex
	result DrainResult
	moved  bool
	err    error
}

// round drains each partition, under the counts in force; again says that they
// changed meanwhile.
func (d *drain) round(ctx context.Context, e *Engine) (again bool, err error) {
	probed, err := e.config.Storage.Probe(ctx, d.outboxes)
	if err != nil {
		return false, err
	}
	e.mu.Lock()
	e.apply(probed)
	workers := e.active(d.outboxes)
	e.mu.Unlock()

	d.moved = false
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() {
			t := &tally{once: true}
			end := w.drain(d.scope, t)
			d.mu.Lock()
			defer d.mu.Unlock()
			d.result.Delivered += t.delivered
			d.result.Failed += t.failed
			d.moved = d.moved || end.verdict == moved
			if d.err == nil && end.verdict == fault {
				d.err = end.err
			}
		})
	}
	wg.Wait()
	return d.moved && !d.scope.stopping(), d.err
}

// maxDrainFaults is how often in a row a drain meets a failing storage before
// it gives up.
const maxDrainFaults = 5

// drain runs until nothing of the partition is ready or may be tried again.
func (w *worker) drain(s *scope, t *tally) ending {
	p := newPause()
	defer p.stop()
	faults := 0
	for {
		end := w.takeTurn(s, t, s.soft.Done())
		if end.verdict == stray {
			end.verdict, end.err = w.remap(s)
		}
		if end.verdict == fault {
			faults++
		} else {
			faults = 0
		}
		switch {
		case end.verdict == idle, end.verdict == out, end.verdict == stopped, end.verdict == moved, faults == maxDrainFaults:
			return end
		}
		p.set(end, w)
		if !p.wait(nil, s.soft.Done()) {
			return ending{verdict: stopped}
		}
	}
}

// maxTried bounds the messages that a drain leaves aside.
const maxTried = 1000

// tally counts what became of messages over some runs.
type tally struct {
	delivered, failed int
	// once: a message that failed is left aside, as a drain does.
	once  bool
	tried aside
	seen  map[int64]bool
	over  bool // nothing may be tried any more
}

func (t *tally) add(batch []Envelope, out *outcome, o Ordering) {
	t.delivered += out.delivered()
	t.failed += out.charged()
	if !t.once {
		return
	}
	if t.seen == nil {
		t.seen = make(map[int64]bool)
	}
	for _, f := range out.settlement.Failed {
		// In a total order everybody waits for the retry. Beyond maxTried the
		// oldest may come again; a second failure of one ends the drain then.
		t.over = t.over || o == Total || t.seen[f.ID]
		t.seen[f.ID] = true
		i := slices.IndexFunc(batch, func(e Envelope) bool { return e.ID == f.ID })
		t.tried.add(&batch[i], o)
		if t.tried.len() > maxTried {
			t.tried.take()
		}
	}
}

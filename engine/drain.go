package engine

import (
	"context"
	"fmt"
	"sync"
)

// DrainResult is what a drain came to.
type DrainResult struct {
	Delivered int // messages
	Failed    int // attempts that were charged
	Waiting   int // messages still to be delivered: blocked, delayed or not attempted
}

// Drain delivers what is due in the given outboxes, or in all, once, and
// returns when nothing is ready any more: what failed waits for its retry, and
// an outbox in outage is left. It needs no Start, and shares the partitions
// with running workers, here and elsewhere. When ctx ends it stops like Stop,
// settles, and returns ctx's error with what it did. Waiting is left to the
// caller, who can ask the database.
func (e *Engine) Drain(ctx context.Context, outboxes ...string) (DrainResult, error) {
	if len(outboxes) == 0 {
		outboxes = e.names()
	}
	workers, release, err := e.drainers(ctx, outboxes)
	if err != nil {
		return DrainResult{}, err
	}
	s := newScope(ctx)
	defer s.end()
	defer context.AfterFunc(ctx, func() { s.endHard(context.Cause(ctx)) })()

	var (
		mu    sync.Mutex
		total DrainResult
		wg    sync.WaitGroup
	)
	for _, w := range workers {
		wg.Go(func() {
			if !e.acquireSlot(s.soft.Done()) {
				return
			}
			defer e.releaseSlot()
			t := w.drain(s)
			mu.Lock()
			defer mu.Unlock()
			total.Delivered += t.delivered
			total.Failed += t.failed
		})
	}
	wg.Wait()
	if err := release(); err != nil {
		return total, err
	}
	if err := ctx.Err(); err != nil {
		return total, fmt.Errorf("drain: %w", context.Cause(ctx))
	}
	return total, nil
}

// drainers gives the workers of the outboxes, under the counts in force.
func (e *Engine) drainers(ctx context.Context, outboxes []string) (workers []*worker, release func() error, err error) {
	probed, err := e.config.Storage.Probe(ctx, outboxes)
	if err != nil {
		return nil, nil, fmt.Errorf("drain: %w", err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	release = func() error { return nil }
	if e.run == nil {
		if release, err = e.exclude(ctx); err != nil {
			return nil, nil, err
		}
	}
	e.apply(probed)
	for _, name := range outboxes {
		if o := e.outboxes[name]; o != nil {
			workers = append(workers, o.workers[:o.active]...)
		}
	}
	return workers, release, nil
}

// drain runs until nothing of the partition is ready, or a message fails for
// the second time.
func (w *worker) drain(s *scope) *tally {
	p := newPause()
	defer p.stop()
	t := &tally{retrying: make(map[int64]bool)}
	for !s.stopping() {
		v := w.run(s, t)
		switch {
		case v == idle || v == out || v == stopped || t.repeats:
			return t
		case v == moved:
			w.engine.poll(s)
		case v == stray:
			v = w.remap(s)
		}
		p.set(v, w)
		if !p.wait(nil, s.soft.Done()) {
			break
		}
	}
	return t
}

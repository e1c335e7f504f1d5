package engine

import (
	"context"
	"time"
)

// outbox is one outbox's workers, one a partition. They outlive a Stop, with
// what they know of the destination.
type outbox struct {
	config  *OutboxConfig
	workers []*worker
	active  int // the partition count in force: workers beyond it rest
}

// all gives every worker that there ever was, by outbox and partition. Like
// active and apply it is called with the engine's lock.
func (e *Engine) all() []*worker {
	var workers []*worker
	for _, name := range e.names() {
		workers = append(workers, e.outboxes[name].workers...)
	}
	return workers
}

// active gives the workers of the outboxes under the counts in force.
func (e *Engine) active(outboxes []string) []*worker {
	var workers []*worker
	for _, name := range outboxes {
		if o := e.outboxes[name]; o != nil {
			workers = append(workers, o.workers[:o.active]...)
		}
	}
	return workers
}

// apply takes in what a probe found: the partition counts in force.
func (e *Engine) apply(probed map[string]Probed) {
	for name, p := range probed {
		o := e.outboxes[name]
		if o == nil {
			continue
		}
		if o.active != p.Partitions {
			e.resize(o, p.Partitions)
		}
		if r := e.run; r != nil && r.loops != nil && !r.stopping() {
			r.match(o)
		}
	}
}

// resize makes n workers active, keeping those that there are.
func (e *Engine) resize(o *outbox, n int) {
	for i := len(o.workers); i < n; i++ {
		o.workers = append(o.workers, newWorker(e, o.config, i, n))
	}
	for _, w := range o.workers {
		w.partitions.Store(int64(n))
	}
	o.active = n
}

// match starts and ends loops so that those of the active workers run.
func (r *running) match(o *outbox) {
	for i, w := range o.workers {
		end, runs := r.loops[w]
		switch {
		case runs && i >= o.active:
			end()
			delete(r.loops, w)
		case !runs && i < o.active:
			ctx, end := context.WithCancel(r.soft)
			r.loops[w] = end
			r.work.Go(func() {
				w.loop(r.scope, ctx.Done())
				if !r.stopping() {
					// The partition is gone, and its troubles with it.
					w.recovered()
					w.engine.storageWorks(w)
				}
			})
		}
	}
}

// metRival notes that somebody else owns a partition.
func (e *Engine) metRival() {
	now := time.Now()
	e.rival.Store(&now)
}

// hasRivals reports whether others want the partitions as well.
func (e *Engine) hasRivals() bool {
	met := e.rival.Load()
	return met != nil && time.Since(*met) < rivalry
}

// Wake tells the workers concerned that messages may be ready. It never
// blocks, and does nothing while the engine does not run.
func (e *Engine) Wake(w Wake) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.run == nil {
		return
	}
	for name, o := range e.outboxes {
		switch {
		case w.Outbox != "" && w.Outbox != name:
		case w.All || w.Outbox == "":
			for _, worker := range o.workers[:o.active] {
				worker.nudge()
			}
		case o.active > 0:
			o.workers[Partition(w.Hash, o.active)].nudge()
		}
	}
}

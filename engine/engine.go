package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
)

var errStopped = errors.New("outbox: the instance is being stopped")

// Engine delivers the messages of the outboxes it is configured with. Create
// it with New. All methods are safe for concurrent use.
type Engine struct {
	config Config
	log    *zap.Logger

	mu       sync.Mutex
	outboxes map[string]*outbox
	run      *running // nil: not started

	slots   chan struct{}
	calls   sync.WaitGroup // abandoned relay calls
	probing sync.Mutex
	reports reports
}

// outbox is one outbox's workers, one a partition. They outlive a Stop, with
// what they know of the destination.
type outbox struct {
	config  *OutboxConfig
	workers []*worker
	active  int // the partition count in force: workers beyond it rest
}

// running is the state between a Start and the end of its Stop.
type running struct {
	*scope
	work    sync.WaitGroup
	release func() error
	done    chan struct{}
	loops   map[*worker]context.CancelFunc
}

// New returns an engine that is not running.
func New(c Config) *Engine {
	c = c.withDefaults()
	e := &Engine{
		config:   c,
		log:      c.Logger,
		outboxes: make(map[string]*outbox, len(c.Outboxes)),
		slots:    make(chan struct{}, c.MaxDeliveries),
	}
	for i := range c.Outboxes {
		e.outboxes[c.Outboxes[i].Name] = &outbox{config: &c.Outboxes[i]}
	}
	return e
}

// Start begins to deliver and returns when the workers run. It fails if the
// storage cannot be reached, or if another process has the exclusive right to
// relay from it; not if a destination or the push of wake-ups is down.
//
// The end of ctx is a soft stop: no batch is begun, and those in delivery have
// StopTimeout. Relays get ctx's values, not its end. Once stopped, the engine
// can be started again.
func (e *Engine) Start(ctx context.Context) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.run != nil {
		return ErrAlreadyRunning
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	release, err := e.exclude(ctx)
	if err != nil {
		return err
	}
	probed, err := e.config.Storage.Probe(ctx, e.names())
	if err != nil {
		return errors.Join(fmt.Errorf("start: %w", err), release())
	}
	r := &running{
		scope: newScope(ctx), release: release,
		done: make(chan struct{}), loops: make(map[*worker]context.CancelFunc),
	}
	e.run = r
	e.apply(probed)
	e.launch(r)
	context.AfterFunc(ctx, func() { r.stopWithin(e.config.StopTimeout) })
	return nil
}

// launch starts the goroutines of a run, all but the workers', and the one
// that ends it.
func (e *Engine) launch(r *running) {
	r.work.Go(func() { e.pollLoop(r) })
	r.work.Go(func() { e.pruneLoop(r) })
	if e.config.Waker != nil {
		r.work.Go(func() {
			if err := e.config.Waker.Listen(r.soft, e.Wake); err != nil && r.soft.Err() == nil {
				e.log.Warn("listening for wake-ups ended; polling goes on", zap.Error(err))
			}
		})
	}
	go func() {
		<-r.soft.Done()
		r.work.Wait()
		r.end()
		if err := r.release(); err != nil {
			e.log.Warn("release of the exclusive right to relay failed", zap.Error(err))
		}
		e.mu.Lock()
		e.run = nil
		e.mu.Unlock()
		close(r.done)
	}()
}

// exclude takes the exclusive right to relay, where the storage knows one.
func (e *Engine) exclude(ctx context.Context) (release func() error, err error) {
	x, ok := e.config.Storage.(Exclusive)
	if !ok {
		return func() error { return nil }, nil
	}
	if release, err = x.Exclude(ctx); err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	return release, nil
}

// Stop takes no new batch, lets those in delivery settle, and returns when all
// is done. When ctx ends first it cancels the deliveries, waits a little for
// them to settle, and returns an error that names what still runs, such as a
// relay that ignores its context. Stopping an engine that does not run returns
// nil; every one of several concurrent calls waits.
func (e *Engine) Stop(ctx context.Context) error {
	e.mu.Lock()
	r := e.run
	e.mu.Unlock()
	if r == nil {
		return nil
	}
	r.endSoft(errStopped)
	select {
	case <-r.done:
		return e.leftBehind(ctx)
	case <-ctx.Done():
	}
	r.endHard(errStopped)
	grace := time.NewTimer(abandonGrace + settleTimeout)
	defer grace.Stop()
	select {
	case <-r.done:
		return e.leftBehind(ctx)
	case <-grace.C:
		return fmt.Errorf("stop: %w; still running: %s", context.Cause(ctx), strings.Join(e.stillRunning(), ", "))
	}
}

// leftBehind waits for abandoned relay calls as long as ctx allows, and names
// them in its error.
func (e *Engine) leftBehind(ctx context.Context) error {
	returned := make(chan struct{})
	go func() {
		e.calls.Wait()
		close(returned)
	}()
	select {
	case <-returned:
		return nil
	case <-ctx.Done():
	}
	if names := e.stillRunning(); len(names) > 0 {
		return fmt.Errorf("stop: %w; still running: %s", context.Cause(ctx), strings.Join(names, ", "))
	}
	return nil
}

func (e *Engine) stillRunning() []string {
	var names []string
	for _, s := range e.States() {
		switch {
		case s.Stuck:
			names = append(names, fmt.Sprintf("a relay call of outbox %q, partition %d, that ignores its context", s.Outbox, s.Partition))
		case s.Owning:
			names = append(names, fmt.Sprintf("the worker of outbox %q, partition %d", s.Outbox, s.Partition))
		}
	}
	return names
}

// Done returns a channel that is closed when the engine does not run: at once
// if it was not started.
func (e *Engine) Done() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.run == nil {
		closed := make(chan struct{})
		close(closed)
		return closed
	}
	return e.run.done
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
		if e.run == nil || e.run.soft.Err() != nil {
			continue
		}
		for i, w := range o.workers {
			end, runs := e.run.loops[w]
			if runs && i >= o.active {
				end()
				delete(e.run.loops, w)
			} else if !runs && i < o.active {
				ctx, end := context.WithCancel(e.run.soft)
				e.run.loops[w] = end
				e.run.work.Go(func() { w.loop(e.run.scope, ctx.Done()) })
			}
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

// acquireSlot waits for the right to deliver one batch after the other; slots
// are given in the order of asking.
func (e *Engine) acquireSlot(quit <-chan struct{}) bool {
	select {
	case e.slots <- struct{}{}:
		return true
	case <-quit:
		return false
	}
}

func (e *Engine) releaseSlot() { <-e.slots }

// names lists the engine's outboxes, sorted.
func (e *Engine) names() []string {
	names := make([]string, 0, len(e.outboxes))
	for name := range e.outboxes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

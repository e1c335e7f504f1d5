package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// Engine delivers the messages of the outboxes it is configured with. Create
// it with New. All methods are safe for concurrent use.
type Engine struct {
	config Config
	log    *zap.Logger

	mu       sync.Mutex
	outboxes map[string]*outbox
	run      *running // nil: not started

	slots   chan struct{}             // one for each delivery at a time
	rival   atomic.Pointer[time.Time] // when a partition was found busy
	probing sync.Mutex
	reports reports
}

// running is the state between a Start and the end of its Stop.
type running struct {
	*scope
	work    sync.WaitGroup
	release func() error // of the exclusive right to relay
	forget  func() bool  // the end of Start's context
	done    chan struct{}
	loops   map[*worker]context.CancelFunc // nil: it is still starting, or ends
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
// StopTimeout. Relays get ctx's values, not its end. A Stop meanwhile ends the
// Start with an error. Once stopped, the engine can be started again.
func (e *Engine) Start(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	r := &running{scope: newScope(ctx), done: make(chan struct{})}
	e.mu.Lock()
	if e.run != nil {
		e.mu.Unlock()
		return ErrAlreadyRunning
	}
	e.run = r
	e.mu.Unlock()
	if err := e.begin(ctx, r); err != nil {
		e.ended(r)
		return err
	}
	return nil
}

// begin does what may take time, without the lock, and then starts the workers.
func (e *Engine) begin(ctx context.Context, r *running) error {
	asking, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(r.soft, func() { cancel(ErrStopped) })()

	release, err := e.exclude(asking)
	if err != nil {
		return err
	}
	probed, err := e.config.Storage.Probe(asking, e.names())
	e.mu.Lock()
	defer e.mu.Unlock()
	if r.stopping() {
		err = ErrStopped
	}
	if err != nil {
		return errors.Join(err, release())
	}
	r.release, r.loops = release, make(map[*worker]context.CancelFunc)
	r.forget = context.AfterFunc(ctx, func() { r.stopWithin(e.config.StopTimeout) })
	e.apply(probed)
	e.launch(r)
	return nil
}

// launch starts the goroutines of a run, all but the workers', and the one
// that ends it.
func (e *Engine) launch(r *running) {
	r.work.Go(func() { e.pollLoop(r) })
	r.work.Go(func() { e.pruneLoop(r) })
	if e.config.Waker != nil {
		r.work.Go(func() {
			if err := e.config.Waker.Listen(r.soft, e.Wake); err != nil && !r.stopping() {
				e.log.Warn("listening for wake-ups ended; polling goes on", zap.Error(err))
			}
		})
	}
	go func() {
		<-r.soft.Done()
		e.mu.Lock()
		r.loops = nil // from here on no worker is started
		e.mu.Unlock()
		r.work.Wait()
		r.forget()
		if err := r.release(); err != nil {
			e.log.Warn("release of the exclusive right to relay failed", zap.Error(err))
		}
		e.ended(r)
	}()
}

// ended notes that nothing of a run is left.
func (e *Engine) ended(r *running) {
	r.end()
	e.mu.Lock()
	e.run = nil
	e.mu.Unlock()
	close(r.done)
}

// exclude takes the exclusive right to relay, where the storage knows one.
func (e *Engine) exclude(ctx context.Context) (release func() error, err error) {
	if x, ok := e.config.Storage.(Exclusive); ok {
		return x.Exclude(ctx)
	}
	return func() error { return nil }, nil
}

// Stop takes no new batch, lets those in delivery settle, and returns when all
// is done. When ctx ends first it cancels the deliveries, waits a little for
// them to settle, and returns an error that names what still runs, such as a
// relay that ignores its context. An engine that does not run is stopped
// already, but for such a call. Every one of several concurrent calls waits.
func (e *Engine) Stop(ctx context.Context) error {
	e.mu.Lock()
	r := e.run
	e.mu.Unlock()
	if r == nil {
		return e.leftBehind(ctx)
	}
	r.endSoft(ErrStopped)
	select {
	case <-r.done:
		return e.leftBehind(ctx)
	case <-ctx.Done():
	}
	r.endHard(ErrStopped)
	grace := time.NewTimer(abandonGrace + settleTimeout)
	defer grace.Stop()
	select {
	case <-r.done:
		return e.leftBehind(ctx)
	case <-grace.C:
		return e.stillRunning(ctx)
	}
}

// leftBehind waits for abandoned relay calls as long as ctx allows.
func (e *Engine) leftBehind(ctx context.Context) error {
	e.mu.Lock()
	workers := e.all()
	e.mu.Unlock()
	for _, w := range workers {
		if !w.awaitStuck(ctx.Done()) && w.stuckCall() != nil {
			return e.stillRunning(ctx)
		}
	}
	return nil
}

// stillRunning is the error of a Stop whose time is up.
func (e *Engine) stillRunning(ctx context.Context) error {
	var names []string
	for _, s := range e.States() {
		switch {
		case s.Stuck:
			names = append(names, fmt.Sprintf("a relay call of outbox %q, partition %d, that ignores its context", s.Outbox, s.Partition))
		case s.Owning:
			names = append(names, fmt.Sprintf("the worker of outbox %q, partition %d", s.Outbox, s.Partition))
		}
	}
	if len(names) == 0 {
		names = []string{"a call of the storage or the waker that ignores its context"}
	}
	return fmt.Errorf("stop: %w; still running: %s", context.Cause(ctx), strings.Join(names, ", "))
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

// names lists the engine's outboxes, sorted.
func (e *Engine) names() []string {
	names := make([]string, 0, len(e.outboxes))
	for name := range e.outboxes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

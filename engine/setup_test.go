package engine_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
)

const orders = "orders"

var errBroken = errors.New("broken")

// bubble runs a test in virtual time, next to others.
func bubble(t *testing.T, test func(*testing.T)) {
	t.Helper()
	t.Parallel()
	synctest.Test(t, test)
}

// fixture is an engine over a storage in memory, with what it did.
type fixture struct {
	*engine.Engine
	config   engine.Config
	storage  *memory
	relay    *recorder
	logs     *observer.ObservedLogs
	observed *observations
	begun    time.Time
}

// setup makes an engine for one outbox, "orders", that is not started.
func setup(t *testing.T, partitions int, changes ...func(*engine.Config)) *fixture {
	t.Helper()
	f := &fixture{
		storage:  newMemory(map[string]int{orders: partitions}),
		relay:    &recorder{},
		observed: &observations{},
		begun:    time.Now(),
	}
	core, logs := observer.New(zapcore.InfoLevel)
	f.logs = logs
	f.config = engine.Config{
		Storage:  f.storage,
		Outboxes: []engine.OutboxConfig{{Name: orders, Relay: f.relay, Backoff: backoff.Constant(2 * time.Second)}},
		Logger:   zap.New(core),
		Observer: f.observed,
	}
	for _, change := range changes {
		change(&f.config)
	}
	f.Engine = engine.New(f.config)
	return f
}

// outbox changes the settings of the only outbox.
func outbox(change func(*engine.OutboxConfig)) func(*engine.Config) {
	return func(c *engine.Config) { change(&c.Outboxes[0]) }
}

// start starts the engine, and stops it when the test ends.
func (f *fixture) start(t *testing.T) {
	t.Helper()
	if err := f.Start(context.WithoutCancel(t.Context())); err != nil {
		t.Fatalf("start: %v", err)
	}
	t.Cleanup(func() { f.stop(t) })
	synctest.Wait()
}

// node makes another engine over the same storage and relay.
func (f *fixture) node() *fixture {
	other := *f
	other.Engine = engine.New(f.config)
	return &other
}

func (f *fixture) stop(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	if err := f.Stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
}

// wantPending checks how many messages are still to be delivered.
func (f *fixture) wantPending(t *testing.T, want int) {
	t.Helper()
	if got := f.storage.pending(); len(got) != want {
		t.Errorf("after %v: %d messages are pending, want %d", time.Since(f.begun), len(got), want)
	}
}

// wantUncharged checks that no message was charged.
func (f *fixture) wantUncharged(t *testing.T) {
	t.Helper()
	for _, id := range f.storage.pending() {
		if row := f.storage.row(id); row.Attempts > 0 {
			t.Errorf("message %d was charged: %s", id, row.LastError)
		}
	}
	if dead := f.storage.with("dead"); len(dead) > 0 {
		t.Errorf("messages %v are dead", dead)
	}
}

// wantLogs checks the log's lines, each by its beginning.
func (f *fixture) wantLogs(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, entry := range f.logs.All() {
		got = append(got, entry.Message)
	}
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("the log has %q, want %q", got, want)
	}
}

// delivery is one call of the relay.
type delivery struct {
	at        time.Duration // since the first call of the recorder's clock
	partition int
	ids       []int64
	attempts  []int
}

// recorder is a relay that notes what it is called with.
type recorder struct {
	mu         sync.Mutex
	begun      time.Time
	deliveries []delivery
	answer     func(context.Context, []engine.Envelope) error // nil: all delivered
	running    int
	most       int // calls side by side
}

func (r *recorder) Deliver(ctx context.Context, batch []engine.Envelope) error {
	r.mu.Lock()
	if r.begun.IsZero() {
		r.begun = time.Now()
	}
	d := delivery{at: time.Since(r.begun), partition: batch[0].Partition}
	for _, env := range batch {
		d.ids, d.attempts = append(d.ids, env.ID), append(d.attempts, env.Attempts)
	}
	r.deliveries = append(r.deliveries, d)
	r.running++
	r.most = max(r.most, r.running)
	answer := r.answer
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.running--
	}()
	if answer == nil {
		return nil
	}
	return answer(ctx, batch)
}

// sideBySide gives the largest number of calls at one time.
func (r *recorder) sideBySide() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.most
}

// set changes what the relay does; nil: it delivers.
func (r *recorder) set(answer func(context.Context, []engine.Envelope) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.answer = answer
}

// recorded gives the calls since the last look.
func (r *recorder) recorded() []delivery {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := r.deliveries
	r.deliveries = nil
	return d
}

// ids gives the messages of the calls since the last look.
func (r *recorder) ids() []int64 {
	var ids []int64
	for _, d := range r.recorded() {
		ids = append(ids, d.ids...)
	}
	return ids
}

// taking makes each call last for d, or until its context ends.
func taking(d time.Duration) func(context.Context, []engine.Envelope) error {
	return func(ctx context.Context, _ []engine.Envelope) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// always makes each call fail as a whole.
func always(err error) func(context.Context, []engine.Envelope) error {
	return func(context.Context, []engine.Envelope) error { return err }
}

// naming makes the relay fail the messages that the function has an error for.
func naming(fails func(engine.Envelope) error) func(context.Context, []engine.Envelope) error {
	return func(_ context.Context, batch []engine.Envelope) error {
		var failed engine.BatchError
		for _, env := range batch {
			if err := fails(env); err != nil {
				failed.Fail(env.ID, err)
			}
		}
		if len(failed.Failed) == 0 {
			return nil
		}
		return &failed
	}
}

// observations keeps what the observer was told.
type observations struct {
	mu   sync.Mutex
	list []engine.Observation
}

func (o *observations) Observe(seen engine.Observation) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list = append(o.list, seen)
}

// of gives those of one kind.
func (o *observations) of(kind engine.ObservationKind) []engine.Observation {
	o.mu.Lock()
	defer o.mu.Unlock()
	var list []engine.Observation
	for _, seen := range o.list {
		if seen.Kind == kind {
			list = append(list, seen)
		}
	}
	return list
}

// fakeWaker is a waker whose state and wakes the test decides.
type fakeWaker struct {
	mu    sync.Mutex
	state engine.PushState
	wake  func(engine.Wake)
	err   error // ends Listen at once
}

func (w *fakeWaker) Listen(ctx context.Context, wake func(engine.Wake)) error {
	w.mu.Lock()
	w.wake = wake
	err := w.err
	w.mu.Unlock()
	if err != nil {
		return err
	}
	wake(engine.Wake{All: true})
	<-ctx.Done()
	return ctx.Err()
}

func (w *fakeWaker) State() engine.PushState {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state
}

func (w *fakeWaker) set(state engine.PushState) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.state = state
}

// lane names a partition of the outbox "orders".
func lane(partition, partitions int) engine.Lane {
	return engine.Lane{Outbox: orders, Partition: partition, Partitions: partitions}
}

// repeated gives n times the same group.
func repeated(group string, n int) []string { return slices.Repeat([]string{group}, n) }

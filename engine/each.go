package engine

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"
)

// EachOption adjusts Each.
type EachOption func(*each)

// Concurrency lets Each handle up to n groups of a batch side by side, each
// message without a group being one of its own. The default and the least is
// 1. Order within a group is kept.
func Concurrency(n int) EachOption {
	return func(e *each) { e.concurrency = max(n, 1) }
}

// Timeout bounds one call of the function; running into it counts as that
// message's failure. A call is not started when less than its timeout is left
// of the batch's time. The default is half of the outbox's DeliverTimeout, and
// the most is nine tenths of it, so that a batch's first call can be started.
func Timeout(d time.Duration) EachOption {
	return func(e *each) { e.timeout = max(d, 0) }
}

// Each makes a relay of a function that handles one message. What the function
// returns concerns that message alone:
//
//   - nil: delivered.
//   - Unavailable(err): the destination is down. Nothing more is sent, nobody
//     is charged, and the worker waits.
//   - Permanent(err), RetryAfter(err, d): as documented there.
//   - any other error, a panic, a timeout: the message failed.
//
// After a failure the later messages of the same group are not sent; other
// groups go on. Before each call Each checks that the worker still owns the
// partition and that the call can finish in time, so that a slow batch ends
// between two messages rather than within one.
func Each(fn func(context.Context, Envelope) error, opts ...EachOption) Relay {
	e := &each{fn: fn, concurrency: 1}
	for _, opt := range opts {
		opt(e)
	}
	return e
}

type each struct {
	fn          func(context.Context, Envelope) error
	concurrency int
	timeout     time.Duration
}

// Deliver implements Relay.
func (e *each) Deliver(ctx context.Context, batch []Envelope) error {
	d := deliveryFrom(ctx)
	r := &eachRun{each: e, ctx: ctx, delivery: d, timeout: e.timeout}
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		if r.timeout == 0 {
			r.timeout = left / 2
		}
		r.timeout = min(r.timeout, left-left/10)
	}
	slots := make(chan struct{}, e.concurrency)
	var wg sync.WaitGroup
	for _, group := range sequences(batch, d.ordering) {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			r.deliverInOrder(group)
		})
	}
	wg.Wait()
	return r.result()
}

// sequences splits a batch into what must be delivered one after the other, in
// the order of their first messages.
func sequences(batch []Envelope, o Ordering) [][]*Envelope {
	if o == Total {
		all := make([]*Envelope, len(batch))
		for i := range batch {
			all[i] = &batch[i]
		}
		return [][]*Envelope{all}
	}
	seqs := make([][]*Envelope, 0, len(batch))
	index := make(map[string]int)
	for i := range batch {
		key := batch[i].GroupKey
		if key == "" || o == None {
			seqs = append(seqs, []*Envelope{&batch[i]})
			continue
		}
		at, ok := index[key]
		if !ok {
			at = len(seqs)
			index[key] = at
			seqs = append(seqs, nil)
		}
		seqs[at] = append(seqs[at], &batch[i])
	}
	return seqs
}

// eachRun is the delivery of one batch.
type eachRun struct {
	*each
	ctx      context.Context
	delivery delivery
	timeout  time.Duration

	mu     sync.Mutex
	failed BatchError
}

// deliverInOrder sends one sequence until it ends or a message fails. The rest
// is not attempted, also when the function panics or ends its goroutine.
func (r *eachRun) deliverInOrder(seq []*Envelope) {
	next, err := 0, errGoexit
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
		if next == len(seq) {
			return
		}
		r.fail(seq[next], err)
		for _, env := range seq[next+1:] {
			r.fail(env, ErrNotAttempted)
		}
	}()
	for ; next < len(seq); next++ {
		if err = r.ready(); err != nil {
			return
		}
		err = errGoexit // stands if the call does not return
		if err = r.call(seq[next]); err != nil {
			return
		}
	}
}

// ready says why the next call must not be started, or nil.
func (r *eachRun) ready() error {
	if r.ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ErrNotAttempted, context.Cause(r.ctx))
	}
	if deadline, ok := r.ctx.Deadline(); ok && time.Until(deadline) < r.timeout {
		return fmt.Errorf("%w: not enough of the batch's time is left", ErrNotAttempted)
	}
	r.mu.Lock()
	down := r.failed.Outage
	r.mu.Unlock()
	if down != nil {
		return ErrNotAttempted
	}
	if err := r.delivery.alive(r.ctx); err != nil {
		return fmt.Errorf("%w: %w", ErrNotAttempted, err)
	}
	return nil
}

func (r *eachRun) call(env *Envelope) error {
	ctx := r.ctx
	if r.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.timeout)
		defer cancel()
	}
	err := r.fn(ctx, *env)
	if err != nil && errors.Is(r.ctx.Err(), context.Canceled) {
		// The batch was interrupted: that says nothing of the message. Where
		// its time ran out instead, the message had all of its own.
		return fmt.Errorf("%w: interrupted: %w", ErrNotAttempted, err)
	}
	return err
}

func (r *eachRun) fail(env *Envelope, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if IsUnavailable(err) {
		if r.failed.Outage == nil {
			r.failed.Outage = err
		}
		err = fmt.Errorf("%w: %w", ErrNotAttempted, err)
	}
	r.failed.Fail(env.ID, err)
}

func (r *eachRun) result() error {
	if len(r.failed.Failed) == 0 {
		return nil
	}
	return &r.failed
}

// errGoexit is the failure of a relay that ended its goroutine.
var errGoexit = errors.New("outbox: relay called runtime.Goexit")

// PanicError is the failure of a relay that panicked.
type PanicError struct {
	Value any
	Stack string // cut to what fits beside the message
}

func panicError(value any) error {
	return &PanicError{Value: value, Stack: truncate(string(debug.Stack()), MaxErrorBytes/2)}
}

// Error gives the panic's value and the beginning of its stack.
func (e *PanicError) Error() string {
	return fmt.Sprintf("outbox: relay panicked: %v\n%s", e.Value, e.Stack)
}

// delivery is what the engine tells its own relays beyond the batch.
type delivery struct {
	ordering Ordering
	alive    func(context.Context) error
}

type deliveryKey struct{}

func withDelivery(ctx context.Context, d delivery) context.Context {
	return context.WithValue(ctx, deliveryKey{}, d)
}

// deliveryFrom gives the delivery that ctx carries; without one, as in a test
// that calls a relay directly, order is kept by group and all is well.
func deliveryFrom(ctx context.Context) delivery {
	if d, ok := ctx.Value(deliveryKey{}).(delivery); ok {
		return d
	}
	return delivery{ordering: ByGroup, alive: func(context.Context) error { return nil }}
}

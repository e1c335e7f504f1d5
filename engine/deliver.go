package engine

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// abandonGrace is how long a relay may take to return after its context ended
// before the call is abandoned.
const abandonGrace = time.Second

// deliver hands a batch to the relay and judges the answer. It returns when
// the relay does, or abandonGrace after the context's end at the latest; then
// the call is left to itself, and whatever it answers is thrown away.
func (w *worker) deliver(c Claim, page Page) outcome {
	ctx, cancel := context.WithCancelCause(w.scope.hard)
	defer cancel(nil)
	ctx, stop := context.WithTimeout(ctx, w.config.DeliverTimeout)
	defer stop()
	ctx = withDelivery(ctx, delivery{ordering: w.config.Ordering, alive: c.Alive})

	unwatch := c.Watch(func() { cancel(ErrOwnershipLost) })
	call := &relayCall{returned: make(chan struct{})}
	go call.run(ctx, w.config.Relay, page.Envelopes)
	err, abandoned := call.await(ctx)
	unwatch()
	if abandoned {
		w.stuck.Store(call)
		return outcome{notAttempted: len(page.Envelopes), abandoned: true, outage: err}
	}
	if errors.Is(ctx.Err(), context.Canceled) {
		err = spare(err, context.Cause(ctx))
	}
	out := w.config.judge(page.Envelopes, err, page.Now)
	if cause := context.Cause(ctx); errors.Is(cause, ErrOwnershipLost) && out.outage != nil {
		out.outage = fmt.Errorf("%w (%w)", cause, out.outage)
	}
	return out
}

// spare takes the blame from messages that the relay names because a stop or a
// lost partition interrupted it, and not for a reason of their own.
func spare(err, cause error) error {
	failed, ok := errors.AsType[*BatchError](err)
	if !ok || failed == nil {
		return err
	}
	spared := &BatchError{Outage: failed.Outage}
	for id, err := range failed.Failed {
		if errors.Is(err, context.Canceled) || errors.Is(err, cause) {
			err = fmt.Errorf("%w: interrupted: %w", ErrNotAttempted, err)
		}
		spared.Fail(id, err)
	}
	return spared
}

// relayCall is one call of a relay.
type relayCall struct {
	returned chan struct{} // closed when it has
	err      error         // its answer; not to be read before
}

// run calls the relay. There is an answer also when the relay panics or ends
// the goroutine.
func (c *relayCall) run(ctx context.Context, relay Relay, batch []Envelope) {
	c.err = errGoexit
	defer func() {
		if p := recover(); p != nil {
			c.err = panicError(p)
		}
		close(c.returned)
	}()
	c.err = relay.Deliver(ctx, batch)
}

// await waits for the answer, and a little longer than the context.
func (c *relayCall) await(ctx context.Context) (err error, abandoned bool) {
	select {
	case <-c.returned:
		return c.err, false
	case <-ctx.Done():
	}
	grace := time.NewTimer(abandonGrace)
	defer grace.Stop()
	select {
	case <-c.returned:
		return c.err, false
	case <-grace.C:
		return fmt.Errorf("%w: %w", errAbandoned, context.Cause(ctx)), true
	}
}

// errAbandoned ends a claim whose relay call was left to itself.
var errAbandoned = errors.New("relay ignored the end of its context")

// stuckCall gives the abandoned call of this partition, or nil if there is
// none or it has returned. The partition is not served in this process until
// then; another node may.
func (w *worker) stuckCall() *relayCall {
	call := w.stuck.Load()
	if call == nil {
		return nil
	}
	select {
	case <-call.returned: // its answer comes too late
		w.stuck.CompareAndSwap(call, nil)
		return nil
	default:
		return call
	}
}

// awaitStuck waits until an abandoned call has returned.
func (w *worker) awaitStuck(quit <-chan struct{}) bool {
	call := w.stuckCall()
	if call == nil {
		return true
	}
	select {
	case <-call.returned:
		return true
	case <-quit:
		return false
	}
}

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
// the relay does, or abandonGrace after the context's end at the latest.
func (w *worker) deliver(c Claim, page Page) outcome {
	ctx, cancel := context.WithCancelCause(w.scope.hard)
	defer cancel(nil)
	ctx, stop := context.WithTimeout(ctx, w.config.DeliverTimeout)
	defer stop()
	ctx = withDelivery(ctx, delivery{ordering: w.config.Ordering, alive: c.Alive})

	unwatch := c.Watch(func() { cancel(ErrOwnershipLost) })
	answer := make(chan error, 1)
	go w.callRelay(ctx, page.Envelopes, answer)
	err, abandoned := await(ctx, answer)
	unwatch()
	if abandoned {
		w.abandon(answer)
		return outcome{notAttempted: len(page.Envelopes), abandoned: true, outage: err}
	}
	out := w.config.judge(page.Envelopes, err, page.Now)
	if cause := context.Cause(ctx); errors.Is(cause, ErrOwnershipLost) && out.outage != nil {
		out.outage = fmt.Errorf("%w (%w)", cause, out.outage)
	}
	return out
}

// callRelay sends the relay's answer exactly once, also when it panics or ends
// the goroutine.
func (w *worker) callRelay(ctx context.Context, batch []Envelope, answer chan<- error) {
	err := errGoexit
	defer func() {
		if p := recover(); p != nil {
			err = panicError(p)
		}
		answer <- err
	}()
	err = w.config.Relay.Deliver(ctx, batch)
}

// await waits for the answer, and a little longer than the context.
func await(ctx context.Context, answer <-chan error) (err error, abandoned bool) {
	select {
	case err = <-answer:
		return err, false
	case <-ctx.Done():
	}
	grace := time.NewTimer(abandonGrace)
	defer grace.Stop()
	select {
	case err = <-answer:
		return err, false
	case <-grace.C:
		return fmt.Errorf("relay ignored the end of its context: %w", context.Cause(ctx)), true
	}
}

// abandon leaves a relay call to itself. The worker serves its partition again
// when the call has returned; until then another node may.
func (w *worker) abandon(answer <-chan error) {
	returned := make(chan struct{})
	w.stuck.Store(&returned)
	w.engine.calls.Add(1)
	go func() {
		defer w.engine.calls.Done()
		<-answer
		w.stuck.Store(nil)
		close(returned)
	}()
}

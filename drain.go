package outbox

import (
	"context"
	"fmt"

	"github.com/gormoutbox/outbox/dialect"
)

// Drain delivers once what is due in the outboxes, or in all that have a
// relay here, and returns when nothing is ready any more: what failed waits
// for its retry, and an outbox whose destination is unavailable is left. It is
// for tests and jobs. It needs no Start, and shares the work with workers that
// run, here or on other nodes. Waiting counts up to MaxCounted messages of a
// partition.
//
// The errors are those of Start, and ErrUnknownOutbox. When ctx ends it settles
// what was delivered, and returns what it did with ctx's error.
func (in *Instance) Drain(ctx context.Context, outboxes ...string) (DrainResult, error) {
	outboxes, err := in.drainable(outboxes)
	if err != nil {
		return DrainResult{}, err
	}
	b, err := in.binding()
	if err != nil {
		return DrainResult{}, err
	}
	result, err := in.drain(ctx, b, outboxes)
	if err != nil {
		return result, fmt.Errorf("outbox: drain: %w", err)
	}
	return result, nil
}

// drainable gives the outboxes to drain: all that are relayed here if none is
// named.
func (in *Instance) drainable(outboxes []string) ([]string, error) {
	for _, name := range outboxes {
		o, err := in.outbox(name)
		if err != nil {
			return nil, err
		}
		if !o.relayedHere() {
			return nil, noRelay(name)
		}
	}
	if len(outboxes) > 0 {
		return outboxes, nil
	}
	if all := in.relayed(); len(all) > 0 {
		return all, nil
	}
	return nil, noRelay(in.config.names()...)
}

func (in *Instance) drain(ctx context.Context, b *binding, outboxes []string) (DrainResult, error) {
	if err := in.lock(ctx); err != nil {
		return DrainResult{}, err
	}
	eng, err := in.engine(ctx, b)
	in.unlock()
	if err != nil {
		return DrainResult{}, err
	}
	result, err := eng.Drain(ctx, outboxes...)
	if err != nil {
		return result, err
	}
	result.Waiting, err = in.waiting(ctx, b, outboxes)
	return result, err
}

// waiting counts the messages that are still to be delivered.
func (in *Instance) waiting(ctx context.Context, b *binding, outboxes []string) (int, error) {
	queries := make([]dialect.OutboxQuery, len(outboxes))
	for i, name := range outboxes {
		queries[i] = dialect.OutboxQuery{Name: name, Ordering: in.outboxes[name].Ordering}
	}
	report, err := b.admin.Stats(ctx, queries)
	if err != nil {
		return 0, fmt.Errorf("count what waits: %w", err)
	}
	n := 0
	for _, o := range report.Outboxes {
		n += o.Pending()
	}
	return n, nil
}

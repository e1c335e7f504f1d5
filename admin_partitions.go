package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/gormoutbox/outbox/dialect"
)

// remapBatch is the number of messages that one transaction moves to the
// partition count in force.
const remapBatch = 1000

// Pauses of Repartition while a worker owns a partition that is to be emptied.
const (
	remapPauseMin = 5 * time.Millisecond
	remapPauseMax = 250 * time.Millisecond
)

// Repartition puts a partition count in force, for all nodes, whatever counts
// were in force before, and returns when every pending and dead message has
// been moved to its new partition. Publishers need not stop, and order holds.
// Nodes whose configuration names another count that was in force before leave
// the new one alone.
//
// n is from 1 to 10,000, and 1 where the Ordering is Total. When ctx ends
// first, the new count stays in force and workers, or another call, move the
// rest.
func (in *Instance) Repartition(ctx context.Context, outbox string, n int) error {
	b, err := in.administer(outbox)
	if err != nil {
		return err
	}
	o := in.outboxes[outbox]
	switch {
	case n < 1 || n > maxPartitions:
		return fmt.Errorf("outbox: repartition %q: n is %d; it must be from 1 to %d", outbox, n, maxPartitions)
	case o.Ordering == Total && n != 1:
		return fmt.Errorf("outbox: repartition %q: n is %d although Ordering is Total; it must be 1", outbox, n)
	}
	if err := in.repartition(ctx, b, o, n); err != nil {
		return administration(fmt.Errorf("repartition %q: %w", outbox, err))
	}
	return nil
}

func (in *Instance) repartition(ctx context.Context, b *binding, o *Outbox, n int) error {
	facts := dialect.OutboxFacts{Name: o.Name, Partitions: o.Partitions, Ordering: o.Ordering}
	if err := b.admin.EnsureOutboxes(ctx, []dialect.OutboxFacts{facts}); err != nil {
		return err
	}
	if _, err := b.admin.SetPartitions(ctx, o.Name, n, true); err != nil {
		return err
	}
	defer in.wakeAll(ctx, b, o.Name)
	pause := remapPauseMin
	for {
		moved, more, err := b.storage.Remap(ctx, o.Name, remapBatch)
		switch {
		case err != nil:
			return err
		case !more:
			return nil
		case moved > 0:
			pause = remapPauseMin
			continue
		}
		if err := sleep(ctx, pause); err != nil {
			return fmt.Errorf("messages are still in old partitions: %w", err)
		}
		pause = min(2*pause, remapPauseMax)
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

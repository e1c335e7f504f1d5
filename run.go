package outbox

import (
	"context"
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
)

// Start begins to relay and returns when the workers run. It needs a relay, or
// Elsewhere, for each outbox (ErrNoRelay). What the configuration says of
// partitions is recorded in the database.
//
// It fails if the database cannot be reached, if the tables are not migrated
// (ErrNotMigrated), if the pool is too small, or if the instance runs already
// or, on SQLite, another process relays (ErrAlreadyRunning); not if a
// destination or the listener is down.
//
// The end of ctx is a soft stop: no batch is begun, and those in delivery have
// Config.StopTimeout. Relays get the values of ctx, not its end. Once stopped,
// the instance can be started again.
func (in *Instance) Start(ctx context.Context) error {
	b, err := in.binding()
	if err != nil {
		return err
	}
	if missing := in.withoutRelay(); len(missing) > 0 {
		return noRelay(missing...)
	}
	if err := in.start(ctx, b); err != nil {
		return fmt.Errorf("outbox: start: %w", err)
	}
	return nil
}

func (in *Instance) start(ctx context.Context, b *binding) error {
	if err := in.lock(ctx); err != nil {
		return err
	}
	defer in.unlock()
	eng, err := in.engine(ctx, b)
	if err != nil {
		return err
	}
	select {
	case <-eng.Done():
	default:
		return ErrAlreadyRunning
	}
	if err := in.recordPartitions(ctx, b); err != nil {
		return err
	}
	if err := eng.Start(ctx); err != nil {
		return err
	}
	in.attach(ctx, b, eng)
	return nil
}

// lock waits until no Start is under way.
func (in *Instance) lock(ctx context.Context) error {
	select {
	case in.starting <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (in *Instance) unlock() { <-in.starting }

// attach has commits of this process wake the engine, until ctx ends or Stop
// is called. From then on other nodes are told.
func (in *Instance) attach(ctx context.Context, b *binding, eng *engine.Engine) {
	attached := b.hub.Attach(in.relayed(), eng.Wake)
	forget := context.AfterFunc(ctx, attached)
	detach := func() {
		forget()
		attached()
	}
	in.detach.Store(&detach)
}

// Run is Start, then waits for the end of ctx or a Stop, then stops within
// Config.StopTimeout. It returns nil after an orderly stop.
func (in *Instance) Run(ctx context.Context) error {
	if err := in.Start(ctx); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-in.eng.Load().Done():
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), in.config.StopTimeout)
	defer cancel()
	return in.Stop(ctx)
}

// Stop begins no new batch, lets those in delivery settle, sends what is left
// of notifications, and returns when all is done. When ctx ends first, it
// cancels the deliveries, waits a little for them to settle, and returns an
// error that names what still runs, such as a relay that ignores its context.
//
// Where Start was not called, it is Flush. It may be called several times and
// concurrently: each call waits for the same end. A Start that is under way is
// waited for, then stopped.
func (in *Instance) Stop(ctx context.Context) error {
	if err := errors.Join(in.stop(ctx), in.flush(ctx)); err != nil {
		return fmt.Errorf("outbox: stop: %w", err)
	}
	return nil
}

func (in *Instance) stop(ctx context.Context) error {
	if err := in.lock(ctx); err == nil {
		in.unlock()
	}
	if detach := in.detach.Load(); detach != nil {
		(*detach)()
	}
	if eng := in.eng.Load(); eng != nil {
		return eng.Stop(ctx)
	}
	return nil
}

// Flush waits until the notifications of what was committed before are sent.
// It is for a short job that publishes and exits; Start need not have been
// called. An error costs other nodes their poll interval, and no message.
func (in *Instance) Flush(ctx context.Context) error {
	if err := in.flush(ctx); err != nil {
		return fmt.Errorf("outbox: flush: %w", err)
	}
	return nil
}

func (in *Instance) flush(ctx context.Context) error {
	b := in.bound.Load()
	if b == nil {
		return nil // nothing can have been committed
	}
	return b.sender.Flush(ctx)
}

// recordPartitions puts the configured partition counts in force, except those
// that a later deploy has replaced. It comes before the engine, which takes
// the counts from the database.
func (in *Instance) recordPartitions(ctx context.Context, b *binding) error {
	if err := b.admin.EnsureOutboxes(ctx, in.facts()); err != nil {
		return err
	}
	for _, o := range in.config.Outboxes {
		if o.Partitions == 0 || !o.relayedHere() {
			continue
		}
		// Total is of one partition, whatever there was before.
		change, err := b.admin.SetPartitions(ctx, o.Name, o.Partitions, o.Ordering == Total)
		if err != nil {
			return err
		}
		log := in.config.Logger.With(zap.String("outbox", o.Name), zap.Int("configured", o.Partitions), zap.Int("in_force", change.Current))
		switch {
		case change.Superseded:
			log.Warn("the configured partition count was replaced by a later one, which stays in force; Repartition brings it back")
		case change.Changed:
			log.Info("partition count changed")
		}
	}
	return nil
}

// facts is what the database records of the outboxes.
func (in *Instance) facts() []dialect.OutboxFacts {
	facts := make([]dialect.OutboxFacts, len(in.config.Outboxes))
	for i, o := range in.config.Outboxes {
		facts[i] = dialect.OutboxFacts{Name: o.Name, Partitions: o.Partitions, Ordering: o.Ordering}
	}
	return facts
}

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
	if err := in.start(ctx); err != nil {
		return fmt.Errorf("outbox: start: %w", err)
	}
	return nil
}

func (in *Instance) start(ctx context.Context) error {
	b, err := in.binding()
	if err != nil {
		return err
	}
	if missing := in.withoutRelay(); len(missing) > 0 {
		return noRelay(missing...)
	}
	in.starting.Lock()
	defer in.starting.Unlock()
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

// Run is Start, then waits for the end of ctx, then Stop with
// Config.StopTimeout. It returns nil after an orderly stop.
func (in *Instance) Run(ctx context.Context) error {
	if err := in.Start(ctx); err != nil {
		return err
	}
	<-ctx.Done()
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
// concurrently: each call waits for the same end.
func (in *Instance) Stop(ctx context.Context) error {
	if detach := in.detach.Load(); detach != nil {
		(*detach)()
	}
	var stopped error
	if eng := in.eng.Load(); eng != nil {
		stopped = eng.Stop(ctx)
	}
	if err := errors.Join(stopped, in.flush(ctx)); err != nil {
		return fmt.Errorf("outbox: stop: %w", err)
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
	result, err := in.drain(ctx, outboxes)
	if err != nil {
		return result, fmt.Errorf("outbox: drain: %w", err)
	}
	return result, nil
}

func (in *Instance) drain(ctx context.Context, outboxes []string) (DrainResult, error) {
	for _, name := range outboxes {
		o, err := in.outbox(name)
		if err != nil {
			return DrainResult{}, err
		}
		if !o.relayedHere() {
			return DrainResult{}, noRelay(name)
		}
	}
	if len(outboxes) == 0 {
		outboxes = in.relayed()
	}
	if len(outboxes) == 0 {
		return DrainResult{}, noRelay(in.config.names()...)
	}
	b, err := in.binding()
	if err != nil {
		return DrainResult{}, err
	}
	in.starting.Lock()
	eng, err := in.engine(ctx, b)
	in.starting.Unlock()
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
		change, err := b.admin.SetPartitions(ctx, o.Name, o.Partitions, false)
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

// withoutRelay lists the outboxes that have neither a relay nor Elsewhere.
func (in *Instance) withoutRelay() []string {
	var names []string
	for _, o := range in.config.Outboxes {
		if o.Relay == nil {
			names = append(names, o.Name)
		}
	}
	return names
}

// relayed lists the outboxes that this instance relays.
func (in *Instance) relayed() []string {
	var names []string
	for i := range in.config.Outboxes {
		if o := &in.config.Outboxes[i]; o.relayedHere() {
			names = append(names, o.Name)
		}
	}
	return names
}

func (o *Outbox) relayedHere() bool { return o.Relay != nil && o.Relay != Elsewhere }

func noRelay(outboxes ...string) error {
	return fmt.Errorf("%w for %s: set Config.Relays, or Elsewhere where another binary relays it", ErrNoRelay, quoted(outboxes))
}

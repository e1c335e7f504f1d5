package outbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/listener"
	"github.com/gormoutbox/outbox/migrator"
)

// engine returns the engine of the instance, after a look at the database. It
// is made once, and keeps over a Stop what it knows of the destinations. The
// caller holds in.starting.
func (in *Instance) engine(ctx context.Context, b *binding) (*engine.Engine, error) {
	if err := in.check(ctx, b); err != nil {
		return nil, err
	}
	if eng := in.eng.Load(); eng != nil {
		return eng, nil
	}
	deliveries, err := in.maxDeliveries(b)
	if err != nil {
		return nil, err
	}
	waker, err := in.waker(ctx, b)
	if err != nil {
		return nil, err
	}
	eng := engine.New(engine.Config{
		Storage:       b.storage,
		Waker:         waker,
		Outboxes:      in.engineOutboxes(),
		MaxDeliveries: deliveries,
		PollInterval:  in.config.PollInterval,
		StopTimeout:   in.config.StopTimeout,
		Logger:        in.config.Logger,
		Observer:      in.config.Observer,
	})
	in.eng.Store(eng)
	return eng, nil
}

func (in *Instance) engineOutboxes() []engine.OutboxConfig {
	var list []engine.OutboxConfig
	for _, name := range in.relayed() {
		o := in.outboxes[name]
		list = append(list, engine.OutboxConfig{
			Name:           o.Name,
			Relay:          o.Relay,
			Ordering:       o.Ordering,
			BatchSize:      o.BatchSize,
			MaxBatchBytes:  o.MaxBatchBytes,
			DeliverTimeout: o.DeliverTimeout,
			Backoff:        o.Backoff,
			MaxAttempts:    o.MaxAttempts,
			GiveUpAfter:    o.GiveUpAfter,
			AfterDead:      o.AfterDead,
			Retention:      o.Retention,
			DeadRetention:  o.DeadRetention,
		})
	}
	return list
}

// maxDeliveries bounds the deliveries so that the application keeps
// connections of the pool, and a relay that uses the database does not wait
// for itself.
func (in *Instance) maxDeliveries(b *binding) (int, error) {
	n, open := in.config.MaxDeliveries, b.pool.Stats().MaxOpenConnections
	switch {
	case b.dialect != migrator.Postgres || open == 0:
		return n, nil // a delivery holds no connection, or there is no bound
	case open == 1:
		return 0, errors.New("the pool's MaxOpenConns is 1; it must be at least 2, for a delivery holds a connection")
	case n >= open:
		return 0, fmt.Errorf("Config.MaxDeliveries is %d; it must be less than the pool's MaxOpenConns, %d, for each delivery holds a connection", n, open)
	case n == 0:
		return open / 2, nil
	}
	return n, nil
}

// waker makes what listens to the notifications of other nodes; nil: nothing,
// the poll finds everything.
func (in *Instance) waker(ctx context.Context, b *binding) (engine.Waker, error) {
	pg, ok := b.storage.(*dialect.Postgres)
	if !ok || in.config.Notify == Off || len(in.relayed()) == 0 {
		return nil, nil
	}
	connect, err := in.connect(ctx, b.pool)
	if err != nil {
		return nil, err
	}
	if connect == nil {
		in.config.Logger.Warn("the pool's driver is not pgx and Config.ListenDSN is not set: no push, messages of other nodes are found by polling")
		return nil, nil
	}
	return listener.NewNotifier(listener.Config{
		Channels: pg.Channels,
		Connect:  connect,
		Notify:   b.notifyChannel,
		Outboxes: in.relayed(),
		Logger:   in.config.Logger,
	})
}

// notifyChannel sends a notification the way Storage.Notify does: through the
// pool.
func (b *binding) notifyChannel(ctx context.Context, channel, payload string) error {
	_, err := b.pool.ExecContext(ctx, "SELECT pg_notify($1, $2)", channel, payload)
	return err
}

// connect tells how to open a connection to listen on; nil: there is no way.
func (in *Instance) connect(ctx context.Context, pool *sql.DB) (func(context.Context) (*pgx.Conn, error), error) {
	switch {
	case in.config.Listen != nil:
		return in.config.Listen, nil
	case in.config.ListenDSN != "":
		return listener.ConnectFunc(in.config.ListenDSN)
	}
	config, err := connConfig(ctx, pool)
	if err != nil || config == nil {
		return nil, err
	}
	return func(ctx context.Context) (*pgx.Conn, error) {
		// Looked up anew, for a pool may change passwords and hosts with each
		// connection.
		config, err := connConfig(ctx, pool)
		if err != nil {
			return nil, err
		}
		return pgx.ConnectConfig(ctx, config)
	}, nil
}

// connConfig copies the settings of the pool's connections; nil: they are not
// of pgx.
func connConfig(ctx context.Context, pool *sql.DB) (*pgx.ConnConfig, error) {
	conn, err := pool.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("look up the pool's settings: %w", err)
	}
	defer conn.Close()
	var config *pgx.ConnConfig
	err = conn.Raw(func(driverConn any) error {
		if c, ok := driverConn.(*stdlib.Conn); ok {
			config = c.Conn().Config()
		}
		return nil
	})
	if err != nil || config == nil {
		return nil, err
	}
	config.OnNotification = nil // the listener has its own
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	config.RuntimeParams["application_name"] = "outbox-listener"
	return config, nil
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

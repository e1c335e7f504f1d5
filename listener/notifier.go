package listener

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"go.uber.org/zap"

	"github.com/gormoutbox/outbox/backoff"
	"github.com/gormoutbox/outbox/engine"
)

// Config configures a Notifier.
type Config struct {
	// Backoff is the time between attempts to get a working connection. It
	// starts anew once a connection has proven itself twice. Defaults to 250
	// milliseconds, doubled with each attempt, at most 30 seconds, with jitter.
	Backoff backoff.Policy

	// Channels gives the names of the channels to listen on, at least one. It
	// is called before each connection, for they may change with it.
	Channels func(ctx context.Context) ([]string, error)

	// Connect opens a connection, a fresh one for each call. The notifier owns
	// it and closes it: it must not belong to a pool, nor have an
	// OnNotification handler of its own. See ConnectFunc.
	Connect func(ctx context.Context) (*pgx.Conn, error)

	// Logger gets one line for each change of state. Defaults to none.
	Logger *zap.Logger

	// Notify sends a notification the way the application sends its own, not
	// through the listening connection. The notifier tests itself with it.
	Notify func(ctx context.Context, channel, payload string) error

	// OnState is called with each change of State, by the goroutine that
	// listens. It must not block. Optional.
	OnState func(engine.PushState)

	// Outboxes are those whose wakes are passed on.
	Outboxes []string

	// SelfTestEvery is the time between two self-tests, shortened by up to a
	// tenth at random. At most this and twice SelfTestTimeout after a
	// connection has gone silent, it is given up. Defaults to 30 seconds.
	SelfTestEvery time.Duration

	// SelfTestTimeout bounds the sending of a self-test's notification, and
	// then its way back. Defaults to 5 seconds.
	SelfTestTimeout time.Duration
}

// Notifier is an engine.Waker that listens to the notifications of a Postgres
// database, on a connection of its own.
//
// LISTEN that succeeds means little: behind a pooler it reaches a connection
// that serves others, and a connection may die without a word. So the notifier
// proves itself. After LISTEN, and from time to time, it sends a notification
// to itself through the application's connections. Its state is Push only
// after one has come back.
//
//   - No connection, or LISTEN is refused: Degraded; it tries again with
//     backoff.
//   - Nothing comes back on a connection that has worked: it is half-open. It
//     is closed, and replaced as above.
//   - Nothing comes back on a new connection: most likely a pooler in
//     transaction pooling. Polling; it tries again every few minutes, without
//     a word.
//
// Whatever went wrong, everything is woken after each LISTEN that succeeds.
//
// Until it knows better, it first probes with a connection that listens where
// nobody else notifies. Behind a pooler, a LISTEN for wakes would stay on a
// connection of the application, and every wake would be handed to a client
// that does not expect it, and may keep it for ever.
type Notifier struct {
	cfg   Config
	state atomic.Int32 // an engine.PushState

	// Of the goroutine that listens.
	told     engine.PushState // what the log says; silent: nothing yet
	proven   bool             // notifications arrive on new connections, as far as is known
	failures int              // in a row
	unproven int              // probes in a row without an echo
}

// silent as Notifier.told: the log says nothing.
const silent engine.PushState = -1

// unprovenBackoff is the time between attempts where push cannot work, as far
// as one can tell.
var unprovenBackoff = backoff.Exponential{Initial: time.Minute, Max: 10 * time.Minute}

// NewNotifier returns a notifier that is not listening yet. It returns an
// error that names the field of cfg that is missing or out of its bounds.
func NewNotifier(cfg Config) (*Notifier, error) {
	if cfg.Backoff == nil {
		cfg.Backoff = backoff.Exponential{Initial: 250 * time.Millisecond, Max: 30 * time.Second, Jitter: 0.5}
	}
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	if cfg.OnState == nil {
		cfg.OnState = func(engine.PushState) {}
	}
	if cfg.SelfTestEvery == 0 {
		cfg.SelfTestEvery = 30 * time.Second
	}
	if cfg.SelfTestTimeout == 0 {
		cfg.SelfTestTimeout = 5 * time.Second
	}
	cfg.Outboxes = slices.Clone(cfg.Outboxes)
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Notifier{cfg: cfg, told: silent}, nil
}

func (c *Config) validate() error {
	switch {
	case c.Channels == nil:
		return errors.New("listener: Channels is missing")
	case c.Connect == nil:
		return errors.New("listener: Connect is missing")
	case c.Notify == nil:
		return errors.New("listener: Notify is missing")
	case len(c.Outboxes) == 0:
		return errors.New("listener: Outboxes is empty")
	case c.SelfTestEvery < 0:
		return fmt.Errorf("listener: SelfTestEvery %v is negative", c.SelfTestEvery)
	case c.SelfTestTimeout < 0:
		return fmt.Errorf("listener: SelfTestTimeout %v is negative", c.SelfTestTimeout)
	}
	if err := backoff.Validate(c.Backoff); err != nil {
		return fmt.Errorf("listener: Backoff: %w", err)
	}
	return nil
}

// State implements engine.Waker. It is Polling while nobody listens.
func (n *Notifier) State() engine.PushState { return engine.PushState(n.state.Load()) }

// Listen implements engine.Waker. Its error is that of ctx. When it returns,
// the connection is closed. One call at a time.
func (n *Notifier) Listen(ctx context.Context, wake func(engine.Wake)) error {
	n.become(engine.Degraded)
	defer n.become(engine.Polling)
	n.told, n.failures, n.unproven = silent, 0, 0
	for {
		s := newSession(n, wake)
		err := s.run(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		select {
		case <-time.After(n.ended(s, err)):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ended takes note of how a session has ended, and says when to start another.
func (n *Notifier) ended(s *session, err error) (delay time.Duration) {
	if errors.Is(err, errProbed) {
		n.proven, n.unproven = true, 0
		return 0
	}
	if s.proofs == 0 && errors.Is(err, errNoEcho) {
		n.proven = false
		if s.probe {
			n.unproven++
			n.report(engine.Polling, err)
			return unprovenBackoff.Delay(n.unproven)
		}
	}
	if s.proofs > 1 { // one is not enough, or a flapping connection would be replaced without end
		n.failures = 0
	}
	n.failures++
	n.report(engine.Degraded, err)
	return n.cfg.Backoff.Delay(n.failures)
}

// report changes the state, and logs it if the log says otherwise. err is why
// it is not Push.
func (n *Notifier) report(state engine.PushState, err error) {
	n.become(state)
	if n.told == state {
		return
	}
	n.told = state
	switch state {
	case engine.Push:
		n.cfg.Logger.Info("listening for notifications")
	case engine.Degraded:
		n.cfg.Logger.Warn("not listening for notifications: messages of other processes are found by polling until the connection is back", zap.Error(err))
	case engine.Polling:
		n.cfg.Logger.Warn("notifications do not arrive on the listening connection: messages of other processes are found by polling. "+
			"Behind a pooler in transaction pooling, listen on a direct connection", zap.Error(err))
	}
}

func (n *Notifier) become(state engine.PushState) {
	if n.State() != state {
		n.state.Store(int32(state))
		n.cfg.OnState(state)
	}
}

package listener

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgxlisten"

	"github.com/gormoutbox/outbox/engine"
)

const (
	// startTimeout bounds the way to a listening connection.
	startTimeout = 15 * time.Second
	// closeTimeout bounds the wait for a connection's farewell.
	closeTimeout = 2 * time.Second
	// maxMisses is how many self-tests in a row may fail to send their
	// notification before push counts as unproven. A few happen whenever the
	// application's pool is busy.
	maxMisses = 3
)

// probeChannel is where a probe listens: nobody sends anything else there.
const probeChannel = "gormoutbox_probe"

var (
	// errNoEcho ends a session whose self-test was sent and did not arrive.
	errNoEcho = errors.New("self-test did not arrive")
	// errProbed ends a probe that went well.
	errProbed = errors.New("probed")
)

// session is one connection's life: connect, LISTEN, self-tests. A new session
// follows it, with nothing left of it.
type session struct {
	n     *Notifier
	probe bool // only finds out whether notifications arrive
	wake  func(engine.Wake)
	token string        // the payload of this session's self-tests
	echo  chan struct{} // gets one when the token arrives; of capacity one

	// Of the goroutine that runs pgxlisten, until it has ended.
	conn      *pgx.Conn
	waiting   int           // channels without a LISTEN yet
	listening chan struct{} // closed when there are none

	proofs int // self-tests that arrived
}

func newSession(n *Notifier, wake func(engine.Wake)) *session {
	return &session{
		n: n, probe: !n.proven, wake: wake, token: "self-test " + rand.Text(),
		echo: make(chan struct{}, 1), listening: make(chan struct{}),
	}
}

// run lasts until the connection fails or ctx ends, and returns why.
func (s *session) run(ctx context.Context) error {
	channels, err := s.channels(ctx)
	if err != nil {
		return fmt.Errorf("find the channels to listen on: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	listener := &pgxlisten.Listener{
		Connect: s.connect,
		// Every error ends the session, and the first one is its cause: the
		// handlers return none.
		LogError:       func(_ context.Context, err error) { cancel(err) },
		ReconnectDelay: -1, // Listen returns when ctx has ended
	}
	s.waiting = len(channels)
	for _, c := range channels {
		listener.Handle(c, s)
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = listener.Listen(ctx) }) // only ever ctx's error
	cancel(s.watch(ctx, channels[0]))
	wg.Wait()
	s.close()
	return context.Cause(ctx)
}

func (s *session) channels(ctx context.Context) ([]string, error) {
	if s.probe {
		return []string{probeChannel}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	channels, err := s.n.cfg.Channels(ctx)
	if err != nil {
		return nil, err
	}
	if len(channels) == 0 {
		return nil, errors.New("there are none")
	}
	return slices.Compact(slices.Sorted(slices.Values(channels))), nil
}

func (s *session) connect(ctx context.Context) (*pgx.Conn, error) {
	conn, err := s.n.cfg.Connect(ctx)
	s.conn = conn
	return conn, err
}

// close waits until pgx has let go of the connection, and after a while cuts
// it. On a dead network pgx keeps it for 15 seconds, for it asks the server to
// cancel the LISTEN first.
func (s *session) close() {
	if s.conn == nil {
		return
	}
	select {
	case <-s.conn.PgConn().CleanupDone():
	case <-time.After(closeTimeout):
		_ = s.conn.PgConn().Conn().Close()
	}
}

// HandleBacklog implements pgxlisten.BacklogHandler: it is called after LISTEN
// has succeeded on a channel. What was committed before, nobody has heard.
func (s *session) HandleBacklog(context.Context, string, *pgx.Conn) error {
	if !s.probe {
		s.wake(engine.Wake{All: true})
	}
	if s.waiting--; s.waiting == 0 {
		close(s.listening)
	}
	return nil
}

// HandleNotification implements pgxlisten.Handler. It does not block, for a
// connection that is not read holds up the server's queue for everybody.
func (s *session) HandleNotification(_ context.Context, n *pgconn.Notification, _ *pgx.Conn) error {
	if n.Payload == s.token {
		select {
		case s.echo <- struct{}{}:
		default:
		}
		return nil
	}
	if w, ok := engine.DecodeWake(n.Payload, s.n.cfg.Outboxes); ok {
		s.wake(w)
	}
	return nil
}

// watch tests the session again and again, and returns why it must end.
func (s *session) watch(ctx context.Context, channel string) error {
	select {
	case <-s.listening:
	case <-time.After(startTimeout):
		return fmt.Errorf("no listening connection within %v", startTimeout)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for misses := 0; ; {
		pause, err := s.test(ctx, channel, &misses)
		if err != nil {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// test runs one self-test and says when the next is due. Its error ends the
// session. A notification that could not be sent says nothing of the
// connection that would have received it: it is a miss.
func (s *session) test(ctx context.Context, channel string, misses *int) (pause time.Duration, err error) {
	if err := s.notify(ctx, channel); err != nil {
		if *misses++; *misses >= maxMisses {
			s.n.report(engine.Degraded, fmt.Errorf("send a self-test: %w", err))
		}
		return s.n.cfg.Backoff.Delay(*misses), nil
	}
	select {
	case <-s.echo:
	case <-time.After(s.n.cfg.SelfTestTimeout):
		return 0, fmt.Errorf("%w within %v", errNoEcho, s.n.cfg.SelfTestTimeout)
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	*misses = 0
	s.proofs++
	if s.probe {
		return 0, errProbed
	}
	s.n.report(engine.Push, nil)
	every := s.n.cfg.SelfTestEvery
	return every - mathrand.N(every/10+1), nil
}

func (s *session) notify(ctx context.Context, channel string) error {
	select {
	case <-s.echo: // of a test whose outcome was unknown
	default:
	}
	ctx, cancel := context.WithTimeout(ctx, s.n.cfg.SelfTestTimeout)
	defer cancel()
	return s.n.cfg.Notify(ctx, channel, s.token)
}

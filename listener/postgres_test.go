package listener_test

import (
	"context"
	"database/sql"
	"errors"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/pgserver"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/listener"
)

// patience is how long a test waits before it gives up on a real server.
const patience = 30 * time.Second

// node is a notifier that listens to a real server.
type node struct {
	pool    *sql.DB // the application's
	channel string
	conns   chan *pgx.Conn // those that were opened for the notifier, first its probe
	states  chan engine.PushState
	wakes   chan engine.Wake // without those for everything
	all     chan struct{}    // one for each wake for everything
	wake    func(engine.Wake)
	stop    func() error
}

// startNode listens on the DSN, while the application uses pool.
func startNode(t *testing.T, pool *sql.DB, channel, dsn string, change func(*node, *listener.Config)) *node {
	t.Helper()
	connect, err := listener.ConnectFunc(dsn)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{
		pool: pool, channel: channel, conns: make(chan *pgx.Conn, 100),
		states: make(chan engine.PushState, 100), wakes: make(chan engine.Wake, 100), all: make(chan struct{}, 100),
	}
	n.wake = func(w engine.Wake) {
		if w.Outbox == "" {
			n.all <- struct{}{}
		} else {
			n.wakes <- w
		}
	}
	cfg := listener.Config{
		Channels: func(context.Context) ([]string, error) { return []string{channel}, nil },
		Connect: func(ctx context.Context) (*pgx.Conn, error) {
			conn, err := connect(ctx)
			if err == nil {
				n.conns <- conn
			}
			return conn, err
		},
		Notify:   n.notify,
		OnState:  func(s engine.PushState) { n.states <- s },
		Outboxes: []string{"orders"},
	}
	if change != nil {
		change(n, &cfg)
	}
	n.listen(t, cfg)
	return n
}

func (n *node) listen(t *testing.T, cfg listener.Config) {
	t.Helper()
	notifier, err := listener.NewNotifier(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- notifier.Listen(ctx, n.wake)
	}()
	n.stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := n.stop(); !errors.Is(err, context.Canceled) {
			t.Errorf("Listen returned %v", err)
		}
	})
}

func (n *node) notify(ctx context.Context, channel, payload string) error {
	_, err := n.pool.ExecContext(ctx, "SELECT pg_notify($1, $2)", channel, payload)
	return err
}

// send is for NewSender.
func (n *node) send(ctx context.Context, wakes []engine.Wake) error {
	payloads := make([]string, len(wakes))
	for i, w := range wakes {
		payloads[i] = engine.EncodeWake(w)
	}
	_, err := n.pool.ExecContext(ctx, "SELECT pg_notify($1, p) FROM unnest(string_to_array($2, ' ')) p",
		n.channel, strings.Join(payloads, " "))
	return err
}

// await waits for a value that is wanted, and passes over others.
func await[T comparable](t *testing.T, ch <-chan T, want T) {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case got := <-ch:
			if got == want {
				return
			}
		case <-timeout:
			t.Fatalf("waited in vain for %v", want)
		}
	}
}

// latest empties ch and gives the last value.
func latest[T any](ch <-chan T) (v T) {
	for len(ch) > 0 {
		v = <-ch
	}
	return v
}

// awaitWake sends a wake and waits for it.
func (n *node) awaitWake(t *testing.T, hash uint64) {
	t.Helper()
	until(t, "the application's pool has a working connection", func() bool {
		return n.notify(t.Context(), n.channel, engine.EncodeWake(wake("orders", hash))) == nil
	})
	await(t, n.wakes, wake("orders", hash))
}

// until waits for something of which there is no signal.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(patience)
	for !holds() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

func query[T any](t *testing.T, db *sql.DB, text string, args ...any) (v T) {
	t.Helper()
	if err := db.QueryRowContext(t.Context(), text, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return v
}

// C24
func TestWakesReachOtherNodes(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	n := startNode(t, pg.SQL(t), pg.Schema, pg.DSN, nil)
	await(t, n.states, engine.Push)

	sender := listener.NewSender(n.send, nil)
	hub := listener.NewHub(sender)
	missing := map[engine.Wake]bool{}
	for _, h := range []uint64{0, 1<<63 - 1, engine.GroupHash(strings.Repeat("ü", 3000)), engine.GroupHash(strings.Repeat("x", 1<<20))} {
		missing[wake("orders", h)] = true
		hub.Committed([]engine.Wake{wake("orders", h), wake(strings.Repeat("another", 2000), h)})
	}
	if err := sender.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for len(missing) > 0 {
		select {
		case w := <-n.wakes:
			delete(missing, w)
		case <-time.After(patience):
			t.Fatalf("waited in vain for %v", missing)
		}
	}
}

// C27
func TestListeningConnectionIsOwnedAndIdle(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	pool := pg.SQL(t, testdb.PoolSize(2))
	n := startNode(t, pool, pg.Schema, pg.DSN, nil)
	await(t, n.states, engine.Push)
	n.awaitWake(t, 1)

	watch := pg.SQL(t)
	pid := latest(n.conns).PgConn().PID()
	const idle = `SELECT state = 'idle' AND xact_start IS NULL AND backend_xmin IS NULL FROM pg_stat_activity WHERE pid = $1`
	if !query[bool](t, watch, idle, pid) {
		t.Error("the listening connection is in a transaction")
	}
	if err := n.stop(); !errors.Is(err, context.Canceled) {
		t.Errorf("Listen returned %v", err)
	}
	until(t, "the listening connection is gone", func() bool {
		return query[int](t, watch, `SELECT count(*) FROM pg_stat_activity WHERE pid = $1`, pid) == 0
	})
	for range 2 {
		conn, err := pool.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var channels int
		if err := conn.QueryRowContext(t.Context(), `SELECT count(*) FROM pg_listening_channels()`).Scan(&channels); err != nil {
			t.Fatal(err)
		}
		if channels != 0 {
			t.Errorf("a connection of the application listens on %d channels", channels)
		}
	}
}

// C27
func TestFloodOfNotificationsDoesNotFillTheQueue(t *testing.T) {
	t.Parallel()
	srv := startServer(t) // its own, for the queue is the whole server's
	pool := openPool(t, srv.DSN("postgres"))
	const sentinel = 1 << 40
	arrived := make(chan struct{})
	var once sync.Once
	busy := make(chan struct{}, 1) // an engine that never comes to look
	n := startNode(t, pool, "outbox", srv.DSN("postgres"), func(n *node, _ *listener.Config) {
		n.wake = func(w engine.Wake) {
			select {
			case busy <- struct{}{}:
			default:
			}
			if w.Hash == sentinel {
				once.Do(func() { close(arrived) })
			}
		}
	})
	await(t, n.states, engine.Push)
	const flood = `SELECT count(pg_notify('outbox', $1 || lpad(to_hex(i), 16, '0'))) FROM generate_series($2::int + 1, $2 + 10000) i`
	outbox := engine.EncodeWake(wake("orders", 0))[:16]
	for i := range 20 {
		query[int](t, pool, flood, outbox, i*10_000)
	}
	if err := n.notify(t.Context(), "outbox", engine.EncodeWake(wake("orders", sentinel))); err != nil {
		t.Fatal(err)
	}
	select {
	case <-arrived:
	case <-time.After(patience):
		t.Fatal("the last notification did not arrive")
	}
	// The server moves the queue's tail when somebody notifies.
	until(t, "the queue is empty", func() bool {
		query[int](t, pool, flood, outbox, 0)
		return query[float64](t, pool, `SELECT pg_notification_queue_usage()`) < 0.0005
	})
}

// C28
func TestListeningSurvivesTerminationAndRestart(t *testing.T) {
	t.Parallel()
	srv := startServer(t)
	pool := openPool(t, srv.DSN("postgres"))
	n := startNode(t, pool, "outbox", srv.DSN("postgres"), nil)
	for round := range uint64(4) {
		await(t, n.states, engine.Push)
		await(t, n.all, struct{}{})
		n.awaitWake(t, round)
		pid := latest(n.conns).PgConn().PID()
		if round == 1 {
			if err := srv.Restart(pgserver.Fast); err != nil {
				t.Fatal(err)
			}
		} else if !query[bool](t, pool, `SELECT pg_terminate_backend($1)`, pid) {
			t.Error("the listening connection is not there any more")
		}
		await(t, n.states, engine.Degraded)
	}
	await(t, n.states, engine.Push)
}

// C29
func TestHalfOpenConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	direct, err := url.Parse(pg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, direct.Host)
	through := *direct
	through.Host = p.address()
	n := startNode(t, pg.SQL(t), pg.Schema, through.String(), func(_ *node, cfg *listener.Config) {
		cfg.SelfTestEvery, cfg.SelfTestTimeout = 100*time.Millisecond, time.Second
	})
	await(t, n.states, engine.Push)
	await(t, n.all, struct{}{})

	old := latest(p.links)
	old.swallow.Store(true)
	await(t, n.states, engine.Degraded)
	await(t, n.states, engine.Push)
	await(t, n.all, struct{}{})
	n.awaitWake(t, 7)
	select {
	case <-old.closed:
	case <-time.After(patience):
		t.Error("the half-open connection was never closed")
	}
}

// C30
func TestCommitsInTheGapAreFound(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	gap := make(chan struct{})     // the notifier is connected, and does not listen yet
	proceed := make(chan struct{}) // it may
	n := startNode(t, pg.SQL(t), pg.Schema, pg.DSN, func(_ *node, cfg *listener.Config) {
		connect := cfg.Connect
		cfg.Connect = func(ctx context.Context) (*pgx.Conn, error) {
			conn, err := connect(ctx)
			gap <- struct{}{}
			<-proceed
			return conn, err
		}
	})
	<-gap // of the probe
	proceed <- struct{}{}
	for hash := range uint64(2) { // at the start, and after a disconnect
		<-gap
		lost := engine.EncodeWake(wake("orders", hash))
		if err := n.notify(t.Context(), n.channel, lost); err != nil {
			t.Fatal(err)
		}
		select {
		case <-n.all:
			t.Error("everything was woken before LISTEN")
		default:
		}
		proceed <- struct{}{}
		await(t, n.all, struct{}{})
		await(t, n.states, engine.Push)
		query[bool](t, n.pool, `SELECT pg_terminate_backend($1)`, latest(n.conns).PgConn().PID())
	}
	close(proceed)
	<-gap
	if len(n.wakes) != 0 {
		t.Error("a notification arrived that was sent before LISTEN: there was no gap")
	}
}

// C32 (a)
func TestPoolerIsRecognised(t *testing.T) {
	t.Parallel()
	pg := testdb.PgBouncer(t)
	n := startNode(t, pg.SQL(t, testdb.ExecMode(pgx.QueryExecModeExec)), pg.Schema, pg.DSN, func(_ *node, cfg *listener.Config) {
		cfg.SelfTestTimeout = time.Second
	})
	await(t, n.states, engine.Polling)
}

// C32 (b)
func TestDirectConnectionBesideAPooler(t *testing.T) {
	t.Parallel()
	pg := testdb.PgBouncer(t)
	n := startNode(t, pg.SQL(t, testdb.ExecMode(pgx.QueryExecModeExec)), pg.Schema, pg.Direct, nil)
	await(t, n.states, engine.Push)
	n.awaitWake(t, 7)
}

func TestConnectFunc(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	name := strings.Repeat("a", 60)
	for param, want := range map[string]string{
		"":                          "outbox-listener",
		"&application_name=shop":    "shop outbox-listener",
		"&application_name=" + name: name[:47] + " outbox-listener",
	} {
		connect, err := listener.ConnectFunc(pg.DSN + param)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := connect(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got, schema string
		if err := conn.QueryRow(t.Context(), "SELECT current_setting('application_name'), current_schema").Scan(&got, &schema); err != nil {
			t.Error(err)
		}
		if got != want || schema != pg.Schema {
			t.Errorf("application name %q, schema %q, want %q, %q", got, schema, want, pg.Schema)
		}
		if mode := conn.Config().DefaultQueryExecMode; mode != pgx.QueryExecModeSimpleProtocol {
			t.Errorf("exec mode %v", mode)
		}
		if err := conn.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	standby, err := listener.ConnectFunc(pg.DSN + "&target_session_attrs=standby")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := standby(t.Context()); err == nil {
		t.Error("the DSN asks for a standby, and the primary was taken")
	}
	if _, err := listener.ConnectFunc("postgres://user:secret@:port"); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("error for a bad DSN: %v", err)
	}
}

// startServer starts a server of the test's own.
func startServer(t *testing.T) *pgserver.Server {
	t.Helper()
	srv, err := pgserver.Start(pgserver.Options{})
	if errors.Is(err, pgserver.ErrNoBinaries) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := srv.Stop(pgserver.Immediate); err != nil {
			t.Error(err)
		}
	})
	return srv
}

func openPool(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	pool, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
	return pool
}

//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// bouncerConfig forwards every database name and logs everybody in as the
// server's user. Startup parameters it does not know are refused, as they are
// by default: an ignored search_path would send queries to another schema.
const bouncerConfig = `[databases]
* = %s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = any
admin_users = %s
pool_mode = transaction
max_client_conn = 1000
default_pool_size = %d
server_idle_timeout = 5
pidfile = %s
`

// BouncerOptions say how a PgBouncer runs. The zero value is fit for tests.
type BouncerOptions struct {
	// PoolSize is the largest number of server connections for a database.
	// Defaults to 10.
	PoolSize int
}

// Bouncer is a running PgBouncer. Its methods are safe for concurrent use.
type Bouncer struct {
	path string
	port int
	home *home

	mu   sync.Mutex
	proc *process // nil: stopped
}

// StartBouncer starts a PgBouncer in transaction pooling in front of the server
// of the DSN, for all its databases, and returns once it answers, within a
// minute. Clients need no password and become the user of the DSN.
// ErrNoBinaries says that PgBouncer is not installed.
func StartBouncer(dsn string, opts BouncerOptions) (*Bouncer, error) {
	path, err := FindBouncer()
	if err != nil {
		return nil, err
	}
	server, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	h, err := newHome("gormoutbox-bouncer-")
	if err != nil {
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	b := &Bouncer{path: path, home: h}
	if opts.PoolSize <= 0 {
		opts.PoolSize = 10
	}
	err = onFreePort(func(port int) error {
		b.port = port
		return b.up(server, opts)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start pgbouncer: %w", err), h.close())
	}
	return b, nil
}

func (b *Bouncer) up(server *pgx.ConnConfig, opts BouncerOptions) (err error) {
	target := fmt.Sprintf("host=%s port=%d user=%s", server.Host, server.Port, server.User)
	if server.Password != "" {
		target += " password='" + strings.ReplaceAll(server.Password, "'", "''") + "'"
	}
	config := fmt.Sprintf(bouncerConfig, target, b.port, Superuser, opts.PoolSize, b.home.path("bouncer.pid"))
	if err := os.WriteFile(b.home.path("ini"), []byte(config), 0o644); err != nil {
		return err
	}
	b.proc, err = b.home.serve(b.DSN(server.Database), syscall.SIGKILL, b.path, b.home.path("ini"))
	return err
}

// Port is the bouncer's port on 127.0.0.1.
func (b *Bouncer) Port() int { return b.port }

// DSN is the address of one of the server's databases through the bouncer; the
// database pgbouncer is its console, for the simple protocol only. PgBouncer
// refuses startup parameters that it does not track, search_path among them.
func (b *Bouncer) DSN(database string) string { return localURL(b.port, database) }

// Stop kills the bouncer, which keeps nothing, and removes its directory. A
// second call does nothing.
func (b *Bouncer) Stop() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.proc == nil {
		return nil
	}
	p := b.proc
	b.proc = nil
	// Which signal is quick has changed between versions; this one has not.
	if err := errors.Join(p.end(syscall.SIGKILL), b.home.close()); err != nil {
		return fmt.Errorf("stop pgbouncer: %w", err)
	}
	return nil
}

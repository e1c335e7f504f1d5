//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// bouncerConfig forwards every database name and logs everybody in as the
// server's user. Startup parameters it does not know are refused, as they are
// by default: an ignored search_path would send queries to another schema.
const bouncerConfig = `[databases]
* = host=%s port=%d user=%s
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
// of the DSN, for all its databases, and returns once it answers. Clients need
// no password and become the user of the DSN, which must not need one either.
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
	var errs []error
	for range portAttempts {
		if err = b.up(server, opts); err == nil {
			return b, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(fmt.Errorf("start pgbouncer: %w", errors.Join(errs...)), h.close())
}

func (b *Bouncer) up(server *pgx.ConnConfig, opts BouncerOptions) (err error) {
	if b.port, err = freePort(); err != nil {
		return fmt.Errorf("find a port: %w", err)
	}
	config := fmt.Sprintf(bouncerConfig, server.Host, server.Port, server.User, b.port, Superuser, opts.PoolSize, b.home.path("bouncer.pid"))
	if err := os.WriteFile(b.home.path("ini"), []byte(config), 0o644); err != nil {
		return err
	}
	log, err := os.OpenFile(b.home.path("log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(b.path, b.home.path("ini"))
	cmd.Dir, cmd.Stdout, cmd.Stderr = b.home.dir, log, log
	p, err := launch(cmd, b.home.cred, syscall.SIGKILL)
	if err != nil {
		return err
	}
	if err := waitReady(p, b.DSN(server.Database)); err != nil {
		return errors.Join(fmt.Errorf("%w\n%s", err, b.home.logTail()), end(p, syscall.SIGKILL))
	}
	b.proc = p
	return nil
}

// Port is the bouncer's port on 127.0.0.1.
func (b *Bouncer) Port() int { return b.port }

// DSN is the address of one of the server's databases through the bouncer.
// PgBouncer refuses startup parameters that it does not track, search_path
// among them.
func (b *Bouncer) DSN(database string) string { return localURL(b.port, database) }

// Admin is the address of the bouncer's console, which understands the simple
// protocol only.
func (b *Bouncer) Admin() string {
	return localURL(b.port, "pgbouncer") + "&default_query_exec_mode=simple_protocol"
}

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
	if err := errors.Join(end(p, syscall.SIGKILL), b.home.close()); err != nil {
		return fmt.Errorf("stop pgbouncer: %w", err)
	}
	return nil
}

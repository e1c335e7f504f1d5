//go:build unix

package pgserver

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
)

// Superuser is the role that DSN logs in as. It needs no password.
const Superuser = "postgres"

// Options say how a server runs. The zero value is fit for tests.
type Options struct {
	// BinDir is the directory of initdb and postgres. Defaults to
	// FindBinaries.
	BinDir string
	// Durable turns fsync, full_page_writes and synchronous_commit on, as
	// measurements need them. Without it a crash of the machine, though not
	// of the server, loses data.
	Durable bool
	// MaxConnections defaults to 300.
	MaxConnections int
	// Settings are further server settings by name; they win over the above.
	Settings map[string]string
}

// Mode is how a server is stopped.
type Mode int

const (
	// Fast rolls back open transactions and disconnects clients.
	Fast Mode = iota
	// Immediate is a crash: the next start recovers from the log.
	Immediate
)

// Server is a running PostgreSQL. Its methods are safe for concurrent use.
type Server struct {
	bin      string
	settings []string
	port     int
	home     *home

	mu     sync.Mutex
	proc   *process // nil: down
	closed bool
}

// Start creates a server and returns once it accepts connections, within a
// minute. ErrNoBinaries says that PostgreSQL is not installed.
func Start(opts Options) (*Server, error) {
	bin := opts.BinDir
	if bin == "" {
		var err error
		if bin, err = FindBinaries(); err != nil {
			return nil, err
		}
	}
	h, err := newHome("gormoutbox-pg-")
	if err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	s := &Server{bin: bin, settings: opts.settings(), home: h}
	if err := s.create(); err != nil {
		return nil, errors.Join(fmt.Errorf("start postgres: %w", err), h.close())
	}
	return s, nil
}

func (o Options) settings() []string {
	onOff := map[bool]string{true: "on", false: "off"}[o.Durable]
	all := map[string]string{
		"fsync":              onOff,
		"full_page_writes":   onOff,
		"synchronous_commit": onOff,
		"max_connections":    "300",
		"listen_addresses":   "127.0.0.1",
		"timezone":           "UTC",
	}
	if o.MaxConnections > 0 {
		all["max_connections"] = strconv.Itoa(o.MaxConnections)
	}
	maps.Copy(all, o.Settings)
	args := make([]string, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		args = append(args, "--"+name+"="+all[name])
	}
	return args
}

// create makes the cluster and starts it on the first free port.
func (s *Server) create() error {
	initdb := exec.Command(filepath.Join(s.bin, "initdb"), "--pgdata="+s.home.path("data"),
		"--username="+Superuser, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	initdb.Dir = s.home.dir
	if err := run(initdb, s.home.cred); err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	return onFreePort(func(port int) error {
		s.port = port
		return s.up()
	})
}

// up starts the program. The caller holds mu, or nobody else knows the server
// yet.
func (s *Server) up() (err error) {
	// By the socket in the server's own directory: the port may be another's.
	socket := fmt.Sprintf("host=%s port=%d user=%s dbname=postgres sslmode=disable", s.home.dir, s.port, Superuser)
	args := []string{"-D", s.home.path("data"), "-k", s.home.dir, "-p", strconv.Itoa(s.port)}
	s.proc, err = s.home.serve(socket, syscall.SIGQUIT, filepath.Join(s.bin, "postgres"), append(args, s.settings...)...)
	return err
}

// Port is the server's port on 127.0.0.1. It stays the same over a Restart.
func (s *Server) Port() int { return s.port }

// Dir is the directory of the server: its socket is in it, the program's log is
// the file log.
func (s *Server) Dir() string { return s.home.dir }

// DSN is the address of a database for the superuser, over TCP, as a URL.
func (s *Server) DSN(database string) string { return localURL(s.port, database) }

func localURL(port int, database string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.User(Superuser),
		Host:     "127.0.0.1:" + strconv.Itoa(port),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}
	return u.String()
}

// Restart stops the server and starts it again over the same data, on the same
// port.
func (s *Server) Restart(mode Mode) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("restart postgres: it was stopped")
	}
	if err := s.down(mode); err != nil {
		return fmt.Errorf("restart postgres: %w", err)
	}
	if err := s.up(); err != nil {
		return fmt.Errorf("restart postgres: %w", err)
	}
	return nil
}

// Stop stops the server for good and removes its directory. A second call does
// nothing.
func (s *Server) Stop(mode Mode) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if err := errors.Join(s.down(mode), s.home.close()); err != nil {
		return fmt.Errorf("stop postgres: %w", err)
	}
	return nil
}

func (s *Server) down(mode Mode) error {
	if s.proc == nil {
		return nil
	}
	sig := syscall.SIGINT
	if mode == Immediate {
		sig = syscall.SIGQUIT
	}
	p := s.proc
	s.proc = nil
	return p.end(sig)
}

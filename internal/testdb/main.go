package testdb

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/gormoutbox/outbox/internal/pgserver"
)

// Main runs the tests of a package, stops what they share, checks that no
// goroutine is left, and exits. It is all that a TestMain does.
func Main(m *testing.M, opts ...goleak.Option) {
	code := m.Run()
	err := shared.stop()
	if code == 0 {
		err = errors.Join(err, goleak.Find(opts...))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testdb:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// shared is what the tests of a binary have in common.
var shared servers

type servers struct {
	mu         sync.Mutex
	postgres   *pgserver.Server
	bouncer    *pgserver.Bouncer
	server     address
	bouncerURL address
}

// address is a DSN or why there is none, found out once.
type address struct {
	dsn string
	err error
}

func (a *address) get(find func() (string, error)) (*url.URL, error) {
	if a.dsn == "" && a.err == nil {
		a.dsn, a.err = find()
	}
	if a.err != nil {
		return nil, a.err
	}
	u, err := url.Parse(a.dsn)
	if err == nil && u.Scheme != "postgres" && u.Scheme != "postgresql" {
		err = errors.New("the DSN is not a URL like postgres://user@host:port/database")
	}
	return u, err
}

// serverURL is the address of the shared server.
func (s *servers) serverURL() (*url.URL, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.server.get(s.findServer)
}

func (s *servers) findServer() (string, error) {
	if dsn := os.Getenv(pgserver.PostgresEnv); dsn != "" {
		return dsn, nil
	}
	srv, err := pgserver.Start(pgserver.Options{})
	if err != nil {
		return "", err
	}
	s.postgres = srv
	return srv.DSN("postgres"), nil
}

// poolerURL is the address of the shared PgBouncer.
func (s *servers) poolerURL() (*url.URL, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bouncerURL.get(s.findBouncer)
}

func (s *servers) findBouncer() (string, error) {
	if dsn := os.Getenv(pgserver.BouncerEnv); dsn != "" {
		return dsn, nil
	}
	server, err := s.server.get(s.findServer)
	if err != nil {
		return "", err
	}
	b, err := pgserver.StartBouncer(server.String(), pgserver.BouncerOptions{})
	if err != nil {
		return "", err
	}
	s.bouncer = b
	return b.DSN("postgres"), nil
}

func (s *servers) stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	if s.bouncer != nil {
		errs = append(errs, s.bouncer.Stop())
	}
	if s.postgres != nil {
		errs = append(errs, s.postgres.Stop(pgserver.Fast))
	}
	return errors.Join(errs...)
}

// need ends the test if err is set: it skips it where something is not
// installed, unless CI promises that everything is.
func need(t testing.TB, what string, err error) {
	t.Helper()
	switch {
	case err == nil:
	case errors.Is(err, pgserver.ErrNoBinaries) && os.Getenv("CI") != "true":
		t.Skipf("needs %s: %v", what, err)
	default:
		t.Fatalf("needs %s: %v", what, err)
	}
}

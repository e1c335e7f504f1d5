//go:build unix

package pgserver

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		beChild()
		return
	}
	goleak.VerifyTestMain(m)
}

// start runs a server for the test, which is skipped where there is none.
func start(t *testing.T, opts Options) *Server {
	t.Helper()
	s, err := Start(opts)
	if errors.Is(err, ErrNoBinaries) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(Immediate); err != nil {
			t.Error(err)
		}
	})
	return s
}

// query returns the single value that a statement gives; it is run in the
// simple protocol, which PgBouncer's console needs.
func query(t *testing.T, dsn, sql string) string {
	t.Helper()
	conn, err := pgconn.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatalf("connect: %v", err)
	}
	defer conn.Close(context.Background())
	results, err := conn.Exec(t.Context(), sql).ReadAll()
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	last := results[len(results)-1]
	if len(last.Rows) == 0 {
		return ""
	}
	return string(last.Rows[0][0])
}

func requireGone(t *testing.T, dir string) {
	t.Helper()
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("directory %s is left: %v", dir, err)
	}
}

func TestServerLivesAndLeavesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	dsn := s.DSN("postgres")
	for setting, want := range map[string]string{
		"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "300",
	} {
		if got := query(t, dsn, "SHOW "+setting); got != want {
			t.Errorf("%s is %s, want %s", setting, got, want)
		}
	}
	for range 2 { // the second call does nothing
		if err := s.Stop(Fast); err != nil {
			t.Fatal(err)
		}
	}
	requireGone(t, s.Dir())
	if conn, err := pgx.Connect(t.Context(), dsn); err == nil {
		t.Errorf("a stopped server accepts connections: %v", conn.Close(t.Context()))
	}
	if err := s.Restart(Fast); err == nil {
		t.Error("a stopped server was restarted")
	}
}

func TestServerSettings(t *testing.T) {
	t.Parallel()
	s := start(t, Options{Durable: true, MaxConnections: 20, Settings: map[string]string{"synchronous_commit": "local"}})
	for setting, want := range map[string]string{
		"fsync": "on", "full_page_writes": "on", "synchronous_commit": "local", "max_connections": "20",
	} {
		if got := query(t, s.DSN("postgres"), "SHOW "+setting); got != want {
			t.Errorf("%s is %s, want %s", setting, got, want)
		}
	}
}

func TestServersSideBySide(t *testing.T) {
	t.Parallel()
	a, b := start(t, Options{}), start(t, Options{})
	query(t, a.DSN("postgres"), "CREATE DATABASE mine")
	if got := query(t, b.DSN("postgres"), "SELECT count(*) FROM pg_database WHERE datname = 'mine'"); got != "0" {
		t.Error("a database of one server shows in the other")
	}
	if err := a.Stop(Fast); err != nil {
		t.Fatal(err)
	}
	if got := query(t, b.DSN("postgres"), "SELECT 1"); got != "1" {
		t.Errorf("stopping one server hurt the other: got %q", got)
	}
}

func TestRestartKeepsDataAndPort(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]Mode{"fast": Fast, "immediate": Immediate} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := start(t, Options{})
			dsn := s.DSN("postgres")
			query(t, dsn, "CREATE TABLE kept AS SELECT 42 AS n")
			conn, err := pgx.Connect(t.Context(), dsn)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(context.Background())
			query(t, dsn, "CHECKPOINT") // synchronous_commit is off
			if err := s.Restart(mode); err != nil {
				t.Fatal(err)
			}
			if err := conn.Ping(t.Context()); err == nil {
				t.Error("a connection outlived the restart")
			}
			if got := query(t, dsn, "SELECT n FROM kept"); got != "42" {
				t.Errorf("got %q, want 42", got)
			}
		})
	}
}

func TestStartTellsWhatTheServerSaid(t *testing.T) {
	t.Parallel()
	if _, err := FindBinaries(); err != nil && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	s, err := Start(Options{Settings: map[string]string{"max_connections": "many"}})
	if err == nil {
		t.Fatal(errors.Join(errors.New("it started"), s.Stop(Immediate)))
	}
	if !strings.Contains(err.Error(), `invalid value for parameter "max_connections"`) {
		t.Errorf("the server's message is missing: %v", err)
	}
}

func TestTakenPortIsReplaced(t *testing.T) {
	t.Parallel()
	var first net.Listener
	var ports []int
	err := onFreePort(func(port int) (err error) {
		ports = append(ports, port)
		if first != nil {
			return nil
		}
		first, err = net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		return errors.Join(err, errors.New("taken"))
	})
	if first != nil {
		defer first.Close()
	}
	if err != nil || len(ports) != 2 || ports[0] == ports[1] {
		t.Errorf("tried ports %v: %v", ports, err)
	}
}

func TestOtherFailureIsNotRetried(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	calls := 0
	err := onFreePort(func(int) error { calls++; return broken })
	if !errors.Is(err, broken) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}

//go:build unix

package pgserver

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

func startBouncer(t *testing.T, dsn string, opts BouncerOptions) *Bouncer {
	t.Helper()
	b, err := StartBouncer(dsn, opts)
	if errors.Is(err, ErrNoBinaries) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Stop(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func TestBouncerPoolsByTransaction(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	b := startBouncer(t, s.DSN("postgres"), BouncerOptions{PoolSize: 1})

	// Two clients at once take turns on the only server connection.
	var pids []uint32
	for range 2 {
		conn, err := pgx.Connect(t.Context(), b.DSN("postgres")+"&default_query_exec_mode=exec")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(t.Context())
		var pid uint32
		if err := conn.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if pids[0] != pids[1] {
		t.Errorf("two clients had server connections %v of their own", pids)
	}
	if got := query(t, b.DSN("pgbouncer"), "SHOW VERSION"); !strings.HasPrefix(got, "PgBouncer") {
		t.Errorf("the console says %q", got)
	}
}

func TestBouncerRefusesSearchPath(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	b := startBouncer(t, s.DSN("postgres"), BouncerOptions{})
	conn, err := pgx.Connect(t.Context(), b.DSN("postgres")+"&search_path=elsewhere")
	if err == nil {
		t.Errorf("it was ignored: %v", conn.Close(t.Context()))
	}
}

func TestBouncerLeavesNothing(t *testing.T) {
	t.Parallel()
	s := start(t, Options{})
	b := startBouncer(t, s.DSN("postgres"), BouncerOptions{})
	for range 2 { // the second call does nothing
		if err := b.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	requireGone(t, b.home.dir)
}

package migrator_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

const rounds = 30

// together calls Up on all migrators at the same moment and returns what each
// of them said.
func together(ctx context.Context, nodes []*migrator.Migrator) []error {
	errs := make([]error, len(nodes))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i, m := range nodes {
		wg.Go(func() {
			<-start
			errs[i] = m.Up(ctx)
		})
	}
	close(start)
	wg.Wait()
	return errs
}

// nodes are pools of eight nodes that are set up in different ways.
func nodes(t *testing.T, f fixture) []*sql.DB {
	t.Helper()
	options := [][]testdb.Option{
		{testdb.ExecMode(pgx.QueryExecModeCacheStatement)},
		{testdb.ExecMode(pgx.QueryExecModeCacheDescribe)},
		{testdb.ExecMode(pgx.QueryExecModeDescribeExec)},
		{testdb.ExecMode(pgx.QueryExecModeExec)},
		{testdb.ExecMode(pgx.QueryExecModeSimpleProtocol)},
		{testdb.Param("default_transaction_isolation", "repeatable read")},
		{testdb.Param("default_transaction_isolation", "serializable")},
		{testdb.Param("lock_timeout", "1ms")},
	}
	var pools []*sql.DB
	for _, o := range options {
		pools = append(pools, f.open(t, append(o, testdb.PoolSize(1))...))
	}
	return pools
}

// C39: eight connections, an empty database, two tables in a schema that is to
// be created as well.
func TestConcurrentNodes(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	pools := nodes(t, f)
	admin := f.open(t)
	for round := range rounds {
		cfg := f.cfg
		cfg.Schema = fmt.Sprintf("%s_%d", f.pg.Schema, round)
		dropSchemaAtEnd(t, f.pg, cfg.Schema)
		var list []*migrator.Migrator
		for i, pool := range pools {
			cfg.Table = []string{"outbox_a", "outbox_b"}[i%2]
			list = append(list, newMigrator(t, pool, cfg))
		}
		for i, err := range together(t.Context(), list) {
			if err != nil {
				t.Errorf("round %d, node %d: %v", round, i, err)
			}
		}
		assertMigrated(t, list[0])
		assertMigrated(t, list[1])
		exec(t, admin, "DROP SCHEMA "+tables.Quote(cfg.Schema)+" CASCADE")
	}
}

// C39: one of the nodes is killed at a statement of its migration, each round at
// a later one.
func TestConcurrentNodesOneKilled(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	pools, admin := nodes(t, f), f.open(t)
	var steps, killAt atomic.Int64
	victim := newMigrator(t, f.hooked(t, func(string) {
		if steps.Add(1) == killAt.Load() {
			const kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1"
			if _, err := admin.ExecContext(t.Context(), kill, f.pg.Schema); err != nil {
				t.Error(err)
			}
		}
	}), f.cfg)
	list := []*migrator.Migrator{victim}
	for _, pool := range pools {
		list = append(list, newMigrator(t, pool, f.cfg))
	}
	for round := range rounds {
		steps.Store(0)
		killAt.Store(int64(round/2 + 2))
		errs := together(t.Context(), list)
		for i, err := range errs[1:] {
			if err != nil {
				t.Errorf("round %d, node %d: %v", round, i, err)
			}
		}
		// A connection that dies idle in the pool is replaced without notice.
		if err := errs[0]; err != nil && errors.Is(err, migrator.ErrNotMigrated) {
			t.Errorf("round %d, the killed node: %v", round, err)
		}
		assertMigrated(t, list[1])
		// It waits for the lock of the killed one, if the server is still at it.
		if err := list[1].Down(t.Context()); err != nil {
			t.Fatal(err)
		}
		assertNoLocks(t, admin, f.pg.Schema)
	}
}

// C39: four connections to a file, as of two processes.
func TestConcurrentProcesses(t *testing.T) {
	t.Parallel()
	f := onSQLite(t)
	var list []*migrator.Migrator
	for range 2 {
		pool := f.open(t, testdb.PoolSize(2))
		list = append(list, newMigrator(t, pool, f.cfg), newMigrator(t, pool, f.cfg))
	}
	for round := range rounds {
		for i, err := range together(t.Context(), list) {
			if err != nil {
				t.Errorf("round %d, connection %d: %v", round, i, err)
			}
		}
		assertMigrated(t, list[0])
		if err := list[0].Down(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// C21, C63: the context ends before a statement, each time a later one.
func TestCancelledAtEachStep(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		other := f.open(t)
		m := newMigrator(t, other, f.cfg)
		for n := 1; ; n++ {
			ctx, cancel := context.WithCancel(t.Context())
			steps := 0
			pool := f.hooked(t, func(string) {
				if steps++; steps == n {
					cancel()
				}
			})
			err := newMigrator(t, pool, f.cfg).Up(ctx)
			cancel()
			if steps < n {
				if err != nil || n < 10 {
					t.Errorf("up without a cancel: %v, after %d steps", err, steps)
				}
				return
			}
			if err == nil { // cancelled too late
				assertMigrated(t, m)
			} else if !errors.Is(err, context.Canceled) {
				t.Errorf("step %d: %v, want that the context was cancelled", n, err)
			}
			assertGoesOn(t, f, m, other)
		}
	})
}

// assertGoesOn checks that a migration left nothing behind or everything, and
// nothing in the way of the next.
func assertGoesOn(t *testing.T, f fixture, m *migrator.Migrator, db *sql.DB) {
	t.Helper()
	if s := status(t, m); s.Version != 0 && s.Version != s.Latest {
		t.Errorf("half a migration: %+v", s)
	}
	if err := m.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertMigrated(t, m)
	if f.pg != nil {
		assertNoLocks(t, db, f.pg.Schema)
	}
	if err := m.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// assertNoLocks checks that no connection of the application holds an advisory
// lock or waits for one.
func assertNoLocks(t *testing.T, db *sql.DB, application string) {
	t.Helper()
	var locks int
	err := db.QueryRowContext(t.Context(), `SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
		WHERE locktype = 'advisory' AND application_name = $1`, application).Scan(&locks)
	if err != nil || locks != 0 {
		t.Errorf("%d advisory locks are left: %v", locks, err)
	}
}

// C21: a node stops waiting for another when its context ends.
func TestStopsWaitingForAnotherNode(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	reached, goOn := make(chan struct{}), make(chan struct{})
	slow := newMigrator(t, f.hooked(t, func(text string) {
		if text == "COMMIT" {
			close(reached)
			<-goOn
		}
	}), f.cfg)
	done := make(chan error, 1)
	go func() { done <- slow.Up(t.Context()) }()
	<-reached

	const waiting = "waiting node"
	db := f.open(t, testdb.Param("application_name", waiting+f.pg.Schema))
	m := newMigrator(t, db, f.cfg)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waiter := make(chan error, 1)
	go func() { waiter <- m.Up(ctx) }()
	awaitAdvisoryWait(t, f.open(t), waiting+f.pg.Schema)
	cancel()
	if err := <-waiter; !errors.Is(err, context.Canceled) {
		t.Errorf("the waiting node: %v, want that the context was cancelled", err)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Errorf("the slow node: %v", err)
	}
	if err := m.Up(t.Context()); err != nil {
		t.Error(err)
	}
}

// awaitAdvisoryWait returns when a connection of the application waits for an
// advisory lock.
func awaitAdvisoryWait(t *testing.T, db *sql.DB, application string) {
	t.Helper()
	for waits := false; !waits; {
		err := db.QueryRowContext(t.Context(), `SELECT EXISTS (
			SELECT FROM pg_locks JOIN pg_stat_activity USING (pid)
			WHERE locktype = 'advisory' AND NOT granted AND application_name = $1)`, application).Scan(&waits)
		if err != nil {
			t.Fatal(err)
		}
	}
}

// C38: Down waits for a long transaction, but writers do not wait for Down.
func TestDownLetsWritersPass(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	db := f.open(t)
	if err := newMigrator(t, db, f.cfg).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	long, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer long.Rollback()
	if _, err := long.ExecContext(t.Context(), "SELECT FROM outboxer_messages"); err != nil {
		t.Fatal(err)
	}

	gaveWay := make(chan struct{})
	begun := 0
	m := newMigrator(t, f.hooked(t, func(text string) {
		if text == "BEGIN" {
			if begun++; begun == 2 {
				close(gaveWay)
			}
		}
	}), f.cfg)
	done := make(chan error, 1)
	go func() { done <- m.Down(t.Context()) }()
	<-gaveWay
	exec(t, db, "INSERT INTO outboxer_messages (outbox, partition, partitions, type, payload) VALUES ('orders', 0, 1, 'a', '')")
	if err := long.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	assertNotMigrated(t, m)
}

// Down that cannot get its lock says so when its context ends.
func TestDownGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	db := f.open(t)
	if err := newMigrator(t, db, f.cfg).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	long, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer long.Rollback()
	if _, err := long.ExecContext(t.Context(), "SELECT FROM outboxer_messages"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	m := newMigrator(t, f.hooked(t, func(text string) {
		if strings.HasPrefix(text, "DROP TABLE") {
			// Ends while the statement waits, or between the attempts.
			go cancel()
		}
	}), f.cfg)
	if err := m.Down(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("down: %v, want that the context was cancelled", err)
	}
	assertMigrated(t, newMigrator(t, db, f.cfg))
}

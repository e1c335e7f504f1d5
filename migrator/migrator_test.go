package migrator_test

import (
	"context"
	"database/sql"
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).SQL(t)
	long := strings.Repeat("t", 64)
	for name, test := range map[string]struct {
		db   *sql.DB
		cfg  migrator.Config
		want string
	}{
		"no database":      {nil, migrator.Config{Dialect: migrator.SQLite, Table: table}, "db is nil"},
		"no dialect":       {db, migrator.Config{Table: table}, "Config.Dialect"},
		"other dialect":    {db, migrator.Config{Dialect: "mysql", Table: table}, `"mysql"`},
		"no table":         {db, migrator.Config{Dialect: migrator.Postgres}, "table name is empty"},
		"long table":       {db, migrator.Config{Dialect: migrator.Postgres, Table: long}, "64 bytes"}, // C13
		"long schema":      {db, migrator.Config{Dialect: migrator.Postgres, Schema: long, Table: table}, "64 bytes"},
		"schema on sqlite": {db, migrator.Config{Dialect: migrator.SQLite, Schema: "app", Table: table}, "no schemas"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := migrator.New(test.db, test.cfg)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("new: %v, want an error with %s", err, test.want)
			}
			if test.db == nil {
				return
			}
			_, err = migrator.SQL(test.cfg, migrator.Up, migrator.Plain)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("export: %v, want an error with %s", err, test.want)
			}
		})
	}
}

// C63: the pool has one connection.
func TestUpAndDown(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		upAndDown(t, newMigrator(t, f.open(t, testdb.PoolSize(1)), f.cfg))
	})
}

func TestEveryExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			f := onPostgres(t)
			upAndDown(t, newMigrator(t, f.open(t, testdb.ExecMode(mode)), f.cfg))
		})
	}
}

// C21: behind a pooler in transaction pooling.
func TestPgBouncer(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := testdb.PgBouncer(t).SQL(t, testdb.ExecMode(mode))
			upAndDown(t, newMigrator(t, db, migrator.Config{Dialect: migrator.Postgres, Table: table}))
		})
	}
}

func upAndDown(t *testing.T, m *migrator.Migrator) {
	t.Helper()
	ctx := t.Context()
	assertNotMigrated(t, m)
	if err := m.Down(ctx); err != nil {
		t.Errorf("down of nothing: %v", err)
	}
	var installations []string
	for range 2 {
		for range 2 { // the second time there is nothing to do
			if err := m.Up(ctx); err != nil {
				t.Fatal(err)
			}
		}
		assertMigrated(t, m)
		installations = append(installations, status(t, m).Installation)
		if err := m.Down(ctx); err != nil {
			t.Fatal(err)
		}
		assertNotMigrated(t, m)
	}
	if installations[0] == installations[1] {
		t.Error("tables that were made again have the same installation id")
	}
}

func status(t *testing.T, m *migrator.Migrator) migrator.Status {
	t.Helper()
	s, err := m.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func assertNotMigrated(t *testing.T, m *migrator.Migrator) {
	t.Helper()
	err := m.Check(t.Context())
	if !errors.Is(err, migrator.ErrNotMigrated) {
		t.Fatalf("check: %v, want ErrNotMigrated", err)
	}
	for _, remedy := range []string{"outbox.AutoMigrate(db)", "migrator.SQL"} {
		if !strings.Contains(err.Error(), remedy) {
			t.Errorf("the error does not name %s: %v", remedy, err)
		}
	}
	if s := status(t, m); s.Version != 0 || s.Latest != 1 || s.Installation != "" || s.Drift != nil {
		t.Errorf("status of nothing: %+v", s)
	}
}

var installationID = regexp.MustCompile(`^[0-9a-f]{16}$`)

// assertMigrated checks that the tables are there, all of them and right.
func assertMigrated(t *testing.T, m *migrator.Migrator) {
	t.Helper()
	if err := m.Check(t.Context()); err != nil {
		t.Error(err)
	}
	s := status(t, m)
	if s.Version != 1 || s.Latest != 1 || !installationID.MatchString(s.Installation) {
		t.Errorf("status: %+v", s)
	}
	for _, d := range s.Drift {
		t.Errorf("drift: %s", d)
	}
}

func TestNewerVersion(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		db := f.open(t)
		m := newMigrator(t, db, f.cfg)
		if err := m.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		exec(t, db, `UPDATE outboxer_messages_meta SET schema_version = 2 WHERE outbox = ''`)
		for what, call := range map[string]func(context.Context) error{"up": m.Up, "down": m.Down, "check": m.Check} {
			if err := call(t.Context()); !errors.Is(err, migrator.ErrTooNew) {
				t.Errorf("%s: %v, want ErrTooNew", what, err)
			}
		}
		if s := status(t, m); s.Version != 2 || s.Latest != 1 || s.Drift != nil {
			t.Errorf("status: %+v", s)
		}
	})
}

// A table that is made anew beside the old meta table would give out ids again
// under the same installation id.
func TestLostMessageTable(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		db, ctx := f.open(t), t.Context()
		m := newMigrator(t, db, f.cfg)
		if err := m.Up(ctx); err != nil {
			t.Fatal(err)
		}
		exec(t, db, "DROP TABLE outboxer_messages")
		if err := m.Check(ctx); !errors.Is(err, migrator.ErrNotMigrated) {
			t.Errorf("check: %v, want ErrNotMigrated", err)
		}
		if err := m.Up(ctx); err == nil || !strings.Contains(err.Error(), "call Down first") {
			t.Errorf("up: %v, want an error that says what to do", err)
		}
		if drift := status(t, m).Drift; len(drift) == 0 || drift[0] != `table "outboxer_messages" is missing` {
			t.Errorf("drift: %q", drift)
		}
		if err := errors.Join(m.Down(ctx), m.Up(ctx)); err != nil {
			t.Fatal(err)
		}
		assertMigrated(t, m)
	})
}

// Tables that only have the name are neither changed nor dropped.
func TestForeignTables(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		for _, name := range []string{table, table + "_meta"} {
			db, ctx := f.open(t), t.Context()
			m := newMigrator(t, db, f.cfg)
			exec(t, db, "CREATE TABLE "+name+" (mine integer)", "INSERT INTO "+name+" VALUES (1)")
			if err := m.Up(ctx); err == nil {
				t.Errorf("up went over %s", name)
			}
			_ = m.Down(ctx) // may fail, but must not drop
			var rows int
			if err := db.QueryRowContext(ctx, "SELECT count(*) FROM "+name).Scan(&rows); err != nil || rows != 1 {
				t.Errorf("%s has %d rows, want 1: %v", name, rows, err)
			}
			exec(t, db, "DROP TABLE "+name)
			assertNotMigrated(t, m) // the rest was rolled back
		}
	})
}

// Without Schema, the tables are where the meta table is found on the
// search_path, also when a schema before it has a table of the name.
func TestSearchPath(t *testing.T) {
	t.Parallel()
	f, first := onPostgres(t), onPostgres(t)
	plain := f.open(t)
	if err := newMigrator(t, plain, f.cfg).Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, plain, "CREATE TABLE "+first.pg.Schema+".outboxer_messages (mine integer)")

	db := f.open(t, testdb.Param("search_path", first.pg.Schema+", "+f.pg.Schema))
	m := newMigrator(t, db, f.cfg)
	if err := m.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertMigrated(t, m)
	if err := m.Down(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertNotMigrated(t, m)
	exec(t, plain, "SELECT mine FROM "+first.pg.Schema+".outboxer_messages")
}

func TestNoSchemaToCreateIn(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	m := newMigrator(t, f.open(t, testdb.Param("search_path", "")), f.cfg)
	if err := m.Up(t.Context()); err == nil || !strings.Contains(err.Error(), "no schema") {
		t.Errorf("up: %v, want the error of the database", err)
	}
}

package migrator_test

import (
	"database/sql"
	"errors"
	"regexp"
	"testing"

	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

const table = "outboxer_messages"

func newMigrator(t *testing.T, db *sql.DB, cfg migrator.Config) *migrator.Migrator {
	t.Helper()
	m, err := migrator.New(db, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// onBoth runs a test on each database, with a pool of one connection on the
// database of an application that has set everything to the minimum (C63).
func onBoth(t *testing.T, test func(t *testing.T, db *sql.DB, cfg migrator.Config)) {
	t.Helper()
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		test(t, testdb.Postgres(t).SQL(t, testdb.PoolSize(1)), migrator.Config{Dialect: migrator.Postgres, Table: table})
	})
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		test(t, testdb.SQLite(t).SQL(t, testdb.PoolSize(1)), migrator.Config{Dialect: migrator.SQLite, Table: table})
	})
}

func TestUpAndDown(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, db *sql.DB, cfg migrator.Config) {
		ctx, m := t.Context(), newMigrator(t, db, cfg)
		if err := m.Check(ctx); !errors.Is(err, migrator.ErrNotMigrated) {
			t.Fatalf("check of nothing: %v, want ErrNotMigrated", err)
		}
		if s := status(t, m); s.Version != 0 || s.Latest != 1 || s.Installation != "" || s.Drift != nil {
			t.Errorf("status of nothing: %+v", s)
		}
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
			if err := m.Check(ctx); !errors.Is(err, migrator.ErrNotMigrated) {
				t.Errorf("check after down: %v, want ErrNotMigrated", err)
			}
		}
		if installations[0] == installations[1] {
			t.Error("tables that were made again have the same installation id")
		}
	})
}

func status(t *testing.T, m *migrator.Migrator) migrator.Status {
	t.Helper()
	s, err := m.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
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

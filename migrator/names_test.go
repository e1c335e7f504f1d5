package migrator_test

import (
	"context"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

// C13. The last two share all bytes but one. They are in the database at the
// same time, as are a table and one that has the name of another's index.
var tableNames = []string{
	"outbox", "app.outbox", "Out Box", `"quoted"`, `it's; -- {messages} $1 ?`, "ä☃", "outbox_dead",
	strings.Repeat("t", tables.MaxName-1) + "1", strings.Repeat("t", tables.MaxName-1) + "2",
}

func TestNames(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		installations := map[string]string{}
		for _, name := range tableNames {
			f.cfg.Table = name
			migrateTwice(t, f, installations)
		}
	})
}

func TestSchemaNames(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	installations := map[string]string{}
	f.cfg.Schema = f.pg.Schema // exists
	migrateTwice(t, f, installations)
	for _, end := range []string{"_new", `_App "X"`, "_it's; -- {meta} $1", "_ä☃"} {
		f.cfg.Schema = f.pg.Schema + end
		dropSchemaAtEnd(t, f.pg, f.cfg.Schema)
		migrateTwice(t, f, installations)
	}
	f.cfg.Schema = f.pg.Schema + strings.Repeat("s", tables.MaxName-len(f.pg.Schema))
	dropSchemaAtEnd(t, f.pg, f.cfg.Schema)
	for _, f.cfg.Table = range tableNames {
		migrateTwice(t, f, installations)
	}
}

func migrateTwice(t *testing.T, f fixture, installations map[string]string) {
	t.Helper()
	db := f.open(t)
	m := newMigrator(t, db, f.cfg)
	assertNotMigrated(t, m)
	for range 2 {
		if err := m.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		assertMigrated(t, m)
	}
	id := status(t, m).Installation
	if other, ok := installations[id]; ok {
		t.Errorf("%q has the installation id of %q", f.cfg.Table, other)
	}
	installations[id] = f.cfg.Table
	name := tables.Name{Schema: f.cfg.Schema, Table: f.cfg.Table}
	exec(t, db, "INSERT INTO "+name.Messages()+
		" (inserted_at, outbox, partition, partitions, type, payload) SELECT "+now(f.cfg.Dialect)+", 'orders', 0, 1, 'a', ''")
}

func now(d migrator.Dialect) string {
	if d == migrator.SQLite {
		return "0"
	}
	return "statement_timestamp()"
}

func dropSchemaAtEnd(t *testing.T, pg *testdb.PG, schema string) {
	t.Helper()
	db := pg.SQL(t)
	t.Cleanup(func() {
		if _, err := db.ExecContext(context.Background(), "DROP SCHEMA IF EXISTS "+tables.Quote(schema)+" CASCADE"); err != nil {
			t.Error(err)
		}
	})
}

package migrator_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

// newRole makes a role that may use the test's schema and nothing else.
func newRole(t *testing.T, f fixture, db *sql.DB) string {
	t.Helper()
	role := "role_" + f.pg.Schema
	exec(t, db, "CREATE ROLE "+role, "GRANT USAGE ON SCHEMA "+f.pg.Schema+" TO "+role)
	t.Cleanup(func() {
		for _, s := range []string{"DROP OWNED BY " + role, "DROP ROLE " + role} {
			if _, err := db.ExecContext(context.Background(), s); err != nil {
				t.Error(err)
			}
		}
	})
	return role
}

// C38: a role without the right to create tables gets an error that names the
// way out, and after that way was taken it needs no such right.
func TestWithoutRights(t *testing.T) {
	t.Parallel()
	for _, schema := range []bool{false, true} {
		t.Run(map[bool]string{false: "search path", true: "schema"}[schema], func(t *testing.T) {
			t.Parallel()
			f := onPostgres(t)
			if schema {
				f.cfg.Schema = f.pg.Schema
			}
			owner := f.open(t)
			role := newRole(t, f, owner)
			m := newMigrator(t, f.open(t, testdb.Param("role", role)), f.cfg)
			if err := m.Up(t.Context()); err == nil || !strings.Contains(err.Error(), "migrator.SQL") {
				t.Fatalf("up: %v, want an error that names the export", err)
			}
			text, err := migrator.SQL(f.cfg, migrator.Up, migrator.Plain)
			if err != nil {
				t.Fatal(err)
			}
			runScript(t, f, text)
			meta := tables.Name{Schema: f.cfg.Schema, Table: f.cfg.Table}.Meta()
			exec(t, owner, "GRANT SELECT ON "+meta+" TO "+role)
			if err := m.Up(t.Context()); err != nil {
				t.Errorf("up: %v", err)
			}
			assertMigrated(t, m)
			if err := m.Down(t.Context()); err == nil {
				t.Error("down dropped tables of another owner")
			}
		})
	}
}

// C38: a schema that exists takes no right to create schemas.
func TestOwnerOfTheSchemaAlone(t *testing.T) {
	t.Parallel()
	f := onPostgres(t)
	f.cfg.Schema = f.pg.Schema
	admin := f.open(t)
	role := newRole(t, f, admin)
	exec(t, admin, "GRANT CREATE ON SCHEMA "+f.pg.Schema+" TO "+role)
	m := newMigrator(t, f.open(t, testdb.Param("role", role)), f.cfg)
	if err := m.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	assertMigrated(t, m)

	f.cfg.Schema += "_new"
	m = newMigrator(t, f.open(t, testdb.Param("role", role)), f.cfg)
	if err := m.Up(t.Context()); err == nil || !strings.Contains(err.Error(), "create schema") {
		t.Errorf("up in a new schema: %v, want an error that says what is not allowed", err)
	}
}

package migrator_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox/migrator"
)

// runScript runs a text as psql --single-transaction or a migration tool does.
func runScript(t *testing.T, f fixture, text string) {
	t.Helper()
	if f.pg == nil {
		exec(t, f.open(t), text)
		return
	}
	if _, err := f.pg.Conn(t).PgConn().Exec(t.Context(), text).ReadAll(); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
}

// section returns what goose would run of a file in a direction, one statement
// after the other.
func section(t *testing.T, file, direction string) []string {
	t.Helper()
	_, rest, found := strings.Cut(file, "-- +goose "+direction+"\n")
	if !found {
		t.Fatalf("no section %s in\n%s", direction, file)
	}
	if direction == "Up" {
		rest, _, _ = strings.Cut(rest, "-- +goose Down\n")
	}
	var list []string
	for {
		_, begun, found := strings.Cut(rest, "-- +goose StatementBegin\n")
		if !found {
			return list
		}
		var statement string
		statement, rest, found = strings.Cut(begun, "-- +goose StatementEnd\n")
		if !found {
			t.Fatalf("a statement does not end in\n%s", file)
		}
		list = append(list, statement)
	}
}

func export(t *testing.T, cfg migrator.Config, dir migrator.Direction, format migrator.Format) string {
	t.Helper()
	text, err := migrator.SQL(cfg, dir, format)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// C13, C38: what the text creates is what Up creates, whatever the names.
func TestExport(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, f fixture) {
		if f.pg != nil {
			f.cfg.Schema = f.pg.Schema + `_App "X"`
			dropSchemaAtEnd(t, f.pg, f.cfg.Schema)
		}
		for _, f.cfg.Table = range tableNames {
			m := newMigrator(t, f.open(t), f.cfg)
			runScript(t, f, export(t, f.cfg, migrator.Up, migrator.Plain))
			assertExported(t, m)
			runScript(t, f, export(t, f.cfg, migrator.Down, migrator.Plain))
			assertNotMigrated(t, m)

			file := export(t, f.cfg, migrator.Up, migrator.Goose) + "\n" + export(t, f.cfg, migrator.Down, migrator.Goose)
			exec(t, f.open(t), section(t, file, "Up")...)
			assertExported(t, m)
			exec(t, f.open(t), section(t, file, "Down")...)
			assertNotMigrated(t, m)
		}
	})
}

func assertExported(t *testing.T, m *migrator.Migrator) {
	t.Helper()
	assertMigrated(t, m)
	before := status(t, m)
	if err := m.Up(t.Context()); err != nil {
		t.Errorf("up after the export: %v", err)
	}
	if after := status(t, m); after.Installation != before.Installation {
		t.Errorf("up changed the installation from %s to %s", before.Installation, after.Installation)
	}
}

func TestExportRefuses(t *testing.T) {
	t.Parallel()
	cfg := migrator.Config{Dialect: migrator.SQLite, Table: table}
	if _, err := migrator.SQL(cfg, "sideways", migrator.Plain); err == nil || !strings.Contains(err.Error(), "sideways") {
		t.Errorf("unknown direction: %v", err)
	}
	if _, err := migrator.SQL(cfg, migrator.Up, "flyway"); err == nil || !strings.Contains(err.Error(), "flyway") {
		t.Errorf("unknown format: %v", err)
	}
}

func ExampleSQL() {
	cfg := migrator.Config{Dialect: migrator.Postgres, Schema: "app", Table: "orders_outbox"}
	text, err := migrator.SQL(cfg, migrator.Down, migrator.Goose)
	if err != nil {
		panic(err)
	}
	fmt.Print(text)
	// Output:
	// -- +goose Down
	//
	// -- +goose StatementBegin
	// DROP TABLE IF EXISTS "app"."orders_outbox";
	// -- +goose StatementEnd
	//
	// -- +goose StatementBegin
	// DROP TABLE "app"."orders_outbox_meta";
	// -- +goose StatementEnd
}

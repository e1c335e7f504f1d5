package dialect

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/tables"
	"github.com/gormoutbox/outbox/internal/testdb"
	"github.com/gormoutbox/outbox/migrator"
)

// TestSQLitePlans asks SQLite how it would run each statement. None may walk
// through the message table, even where the statistics say that it is empty.
func TestSQLitePlans(t *testing.T) {
	t.Parallel()
	db := planDB(t)
	if _, err := db.ExecContext(t.Context(), "ANALYZE"); err != nil {
		t.Fatal(err)
	}
	table := newLiteTable(tables.Name{Table: "box"})
	for name, text := range statements(table) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, step := range explain(t, db, text) {
				if step == "SCAN box" || strings.HasPrefix(step, "SCAN box ") || strings.HasPrefix(step, "SCAN m ") {
					t.Errorf("walks through the table: %s", step)
				}
				if strings.Contains(step, "AUTOMATIC") {
					t.Errorf("builds an index: %s", step)
				}
			}
		})
	}
}

// TestSQLiteReadyPlan checks that ready messages need no sorting: the index
// gives their order, so that a fetch stops at its limit.
func TestSQLiteReadyPlan(t *testing.T) {
	t.Parallel()
	db := planDB(t)
	table := newLiteTable(tables.Name{Table: "box"})
	for shape, text := range table.fetch {
		for _, step := range explain(t, db, text.quick) {
			if strings.Contains(step, "TEMP B-TREE FOR ORDER BY") {
				t.Errorf("%+v sorts: %s", shape, step)
			}
		}
	}
}

// planDB is a database with the table box.
func planDB(t *testing.T) *sql.DB {
	t.Helper()
	db := testdb.SQLite(t).SQL(t)
	m, err := migrator.New(db, migrator.Config{Dialect: migrator.SQLite, Table: "box"})
	if err == nil {
		err = m.Up(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return db
}

func statements(table *liteTable) map[string]string {
	all := map[string]string{
		"delete": table.settle.del + "(1,2)", "keep": table.settle.keep + "(1,2)",
		"fail": table.settle.fail, "kill": table.settle.kill,
		"probe": table.probe, "prune": table.prune,
		"remap next": table.remap.next, "remap rows": table.remap.rows, "remap move": table.remap.move + "(1,2)",
	}
	for _, ordering := range []engine.Ordering{engine.ByGroup, engine.Total, engine.None} {
		for _, hold := range []bool{false, true} {
			text := table.fetch[fetchShape{ordering: ordering, holdDead: hold, skip: true}]
			name := "fetch " + ordering.String()
			if hold {
				name += " holding dead"
			}
			all[name], all[name+" quick"] = text.full, text.quick
		}
	}
	return all
}

func explain(t *testing.T, db *sql.DB, text string) (steps []string) {
	t.Helper()
	args := make([]any, 7)
	for i := range args {
		args[i] = "[]"
	}
	rows, err := db.QueryContext(t.Context(), "EXPLAIN QUERY PLAN "+text, args...)
	if err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var step string
		if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
			t.Fatal(err)
		}
		steps = append(steps, step)
	}
	if err := rows.Err(); err != nil || len(steps) == 0 {
		t.Fatalf("%d steps, %v", len(steps), err)
	}
	return steps
}

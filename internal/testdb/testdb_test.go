package testdb_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestMain(m *testing.M) { testdb.Main(m) }

// where is what an unqualified name resolves to.
func where(t *testing.T, db *gorm.DB) (schemas string) {
	t.Helper()
	if err := db.Raw("SELECT array_to_string(current_schemas(false), ',')").Scan(&schemas).Error; err != nil {
		t.Fatal(err)
	}
	return schemas
}

func TestPostgresIsolatesTests(t *testing.T) {
	t.Parallel()
	a, b := testdb.Postgres(t), testdb.Postgres(t)
	for _, pg := range []*testdb.PG{a, b} {
		db := pg.Gorm(t)
		if got := where(t, db); got != pg.Schema {
			t.Errorf("search path is %s, want %s alone", got, pg.Schema)
		}
		if err := db.Exec("CREATE TABLE things (id int)").Error; err != nil {
			t.Errorf("create in %s: %v", pg.Schema, err)
		}
	}
}

func TestPgBouncerIsolatesTests(t *testing.T) {
	t.Parallel()
	pg := testdb.PgBouncer(t)
	db := pg.Gorm(t, testdb.ExecMode(pgx.QueryExecModeExec))
	if got := where(t, db); got != pg.Schema {
		t.Errorf("search path is %s, want %s alone", got, pg.Schema)
	}
}

package testdb_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"gorm.io/gorm"

	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestMain(m *testing.M) { testdb.Main(m) }

// text returns the single value of a query.
func text(t *testing.T, db *gorm.DB, sql string, args ...any) (s string) {
	t.Helper()
	if err := db.Raw(sql, args...).Scan(&s).Error; err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return s
}

// searchPath is every schema that unqualified names are looked up in.
const searchPath = "SELECT array_to_string(current_schemas(false), ',')"

func TestPostgresIsolatesTests(t *testing.T) {
	t.Parallel()
	for _, pg := range []*testdb.PG{testdb.Postgres(t), testdb.Postgres(t)} {
		db := pg.Gorm(t)
		if got := text(t, db, searchPath); got != pg.Schema {
			t.Errorf("search path is %s, want %s alone", got, pg.Schema)
		}
		if err := db.Exec("CREATE TABLE things (id int)").Error; err != nil {
			t.Errorf("create in %s: %v", pg.Schema, err)
		}
		conn := pg.Conn(t)
		if _, err := conn.Exec(t.Context(), "SELECT id FROM things"); err != nil {
			t.Errorf("another connection: %v", err)
		}
	}
}

func TestPostgresDropsTheSchema(t *testing.T) {
	t.Parallel()
	var schema string
	t.Run("test", func(t *testing.T) {
		pg := testdb.Postgres(t)
		schema = pg.Schema
		pg.Gorm(t).Exec("CREATE TABLE things (id int)")
	})
	db := testdb.Postgres(t).Gorm(t)
	if got := text(t, db, "SELECT count(*) FROM pg_namespace WHERE nspname = ?", schema); got != "0" {
		t.Errorf("schema %s is left", schema)
	}
}

func TestPgBouncerIsolatesTests(t *testing.T) {
	t.Parallel()
	var name string
	t.Run("test", func(t *testing.T) {
		pg := testdb.PgBouncer(t)
		name = pg.Schema
		direct := &testdb.PG{DSN: pg.Direct, Direct: pg.Direct, Schema: pg.Schema}
		for what, db := range map[string]*gorm.DB{
			"through the pooler": pg.Gorm(t, testdb.ExecMode(pgx.QueryExecModeExec)),
			"direct":             direct.Gorm(t),
		} {
			if got := text(t, db, searchPath); got != pg.Schema {
				t.Errorf("%s: search path is %s, want %s alone", what, got, pg.Schema)
			}
		}
	})
	db := testdb.Postgres(t).Gorm(t)
	if got := text(t, db, "SELECT count(*) FROM pg_database WHERE datname = ?", name); got != "0" {
		t.Errorf("database %s is left", name)
	}
}

func TestPostgresOptions(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	config := &gorm.Config{SkipDefaultTransaction: true}
	db := pg.Gorm(t, testdb.Config(config), testdb.PoolSize(1),
		testdb.Param("application_name", "tester"), testdb.ExecMode(pgx.QueryExecModeSimpleProtocol))
	if got := text(t, db, "SHOW application_name"); got != "tester" {
		t.Errorf("application_name is %q", got)
	}
	if !db.SkipDefaultTransaction {
		t.Error("the configuration was not used")
	}
	// The extended protocol prepares; the simple one cannot.
	if got := text(t, db, "SELECT count(*) FROM pg_prepared_statements WHERE ?", true); got != "0" {
		t.Errorf("%s statements were prepared", got)
	}
	pool, err := db.DB()
	if err != nil {
		t.Fatal(err)
	}
	if got := pool.Stats().MaxOpenConnections; got != 1 {
		t.Errorf("the pool has %d connections", got)
	}
}

func TestPoolsAreClosed(t *testing.T) {
	t.Parallel()
	pg, lite := testdb.Postgres(t), testdb.SQLite(t)
	var ping []func(context.Context) error
	t.Run("test", func(t *testing.T) {
		for _, db := range []*gorm.DB{pg.Gorm(t), lite.Gorm(t)} {
			pool, err := db.DB()
			if err != nil {
				t.Fatal(err)
			}
			ping = append(ping, pool.PingContext)
		}
		ping = append(ping, pg.SQL(t).PingContext, lite.SQL(t).PingContext)
		for i, p := range ping {
			if err := p(t.Context()); err != nil {
				t.Errorf("pool %d: %v", i, err)
			}
		}
	})
	for i, p := range ping {
		if err := p(t.Context()); err == nil || !strings.Contains(err.Error(), "closed") {
			t.Errorf("pool %d is open: %v", i, err)
		}
	}
}

func TestSQLitePragmas(t *testing.T) {
	t.Parallel()
	a, b := testdb.SQLite(t), testdb.SQLite(t)
	if a.Path == b.Path {
		t.Errorf("two tests share %s", a.Path)
	}
	db := a.Gorm(t)
	for pragma, want := range map[string]string{"journal_mode": "wal", "busy_timeout": "5000", "synchronous": "1"} {
		if got := text(t, db, "PRAGMA "+pragma); got != want {
			t.Errorf("%s is %s, want %s", pragma, got, want)
		}
	}
	if err := db.Exec("CREATE TABLE things (id int)").Error; err != nil {
		t.Fatal(err)
	}
	if _, err := a.SQL(t).Exec("INSERT INTO things VALUES (1)"); err != nil {
		t.Errorf("another pool does not see the table: %v", err)
	}
}

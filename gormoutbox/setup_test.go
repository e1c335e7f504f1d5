package gormoutbox_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/glebarez/sqlite"
	"go.uber.org/goleak"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestMain(m *testing.M) {
	// GORM never ends the clean-up of a cache of prepared statements.
	testdb.Main(m, goleak.IgnoreAnyFunction("gorm.io/gorm/internal/lru.NewLRU[...].func1"))
}

// bench is a database and a way of preparing statements, for one test.
type bench struct {
	postgres bool
	// cached and session cache statements by the configuration of the handle
	// and by a session; both together put a cache on a cache.
	cached, session bool
	gorm            func(...testdb.Option) *gorm.DB // on the test's database
	sql             func(testing.TB) *sql.DB        // on a new one
}

// onEach runs a test on both databases, with all ways of preparing statements.
func onEach(t *testing.T, test func(*testing.T, *bench)) {
	t.Helper()
	for _, isPostgres := range []bool{true, false} {
		for _, cached := range []bool{false, true} {
			for _, session := range []bool{false, true} {
				b := &bench{postgres: isPostgres, cached: cached, session: session}
				t.Run(b.String(), func(t *testing.T) {
					t.Parallel()
					if b.postgres {
						pg := testdb.Postgres(t)
						b.gorm = func(o ...testdb.Option) *gorm.DB { return pg.Gorm(t, o...) }
						b.sql = func(t testing.TB) *sql.DB { return testdb.Postgres(t).SQL(t) }
					} else {
						lite := testdb.SQLite(t)
						b.gorm = func(o ...testdb.Option) *gorm.DB { return lite.Gorm(t, o...) }
						b.sql = func(t testing.TB) *sql.DB { return testdb.SQLite(t).SQL(t) }
					}
					test(t, b)
				})
			}
		}
	}
}

func (b *bench) String() string {
	name := "sqlite"
	if b.postgres {
		name = "postgres"
	}
	if b.cached {
		name += " cached"
	}
	if b.session {
		name += " session"
	}
	return name
}

// dialector is GORM's driver on a pool.
func (b *bench) dialector(pool *sql.DB) gorm.Dialector {
	if b.postgres {
		return postgres.New(postgres.Config{Conn: pool})
	}
	return &sqlite.Dialector{Conn: pool}
}

// bare opens a handle that nothing is installed on.
func (b *bench) bare(config gorm.Config, opts ...testdb.Option) *gorm.DB {
	config.PrepareStmt = b.cached
	if config.Logger == nil {
		config.Logger = logger.Discard
	}
	return b.gorm(append(opts, testdb.Config(&config))...)
}

// use returns the handle that a test works with.
func (b *bench) use(db *gorm.DB) *gorm.DB {
	if b.session {
		return db.Session(&gorm.Session{PrepareStmt: true})
	}
	return db
}

// open opens a handle with Install and the table of Row.
func (b *bench) open(t testing.TB, config gorm.Config, opts ...testdb.Option) *gorm.DB {
	t.Helper()
	db := b.bare(config, opts...)
	if err := db.AutoMigrate(&Row{}); err != nil {
		t.Fatal(err)
	}
	if err := gormoutbox.Install(db); err != nil {
		t.Fatal(err)
	}
	return b.use(db)
}

// Row is a business table.
type Row struct {
	ID   int64
	Name string
}

func names(t testing.TB, db *gorm.DB) []string {
	t.Helper()
	var list []string
	if err := db.Model(&Row{}).Order("id").Pluck("name", &list).Error; err != nil {
		t.Fatal(err)
	}
	return list
}

func empty(t testing.TB, db *gorm.DB) {
	t.Helper()
	if err := db.Where("1 = 1").Delete(&Row{}).Error; err != nil {
		t.Fatal(err)
	}
}

func from(t testing.TB, db *gorm.DB) *gormoutbox.Tx {
	t.Helper()
	tx, err := gormoutbox.From(db)
	if err != nil {
		t.Fatalf("From: %v", err)
	}
	return tx
}

// calls are functions to give to OnCommit that tell when they were called.
type calls struct {
	mu   sync.Mutex
	made []string
}

func (c *calls) call(name string) func() {
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.made = append(c.made, name)
	}
}

func (c *calls) want(t testing.TB, names ...string) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Equal(c.made, names) {
		t.Errorf("functions called: %q, want %q", c.made, names)
	}
}

// add does what an outbox does: a row, and a function for after the commit.
func (c *calls) add(t testing.TB, tx *gorm.DB, name string) {
	t.Helper()
	own := from(t, tx)
	// Both databases understand this.
	if _, err := own.ExecContext(t.Context(), fmt.Sprintf("INSERT INTO rows (name) VALUES ('%s')", name)); err != nil {
		t.Fatalf("insert %s: %v", name, err)
	}
	own.OnCommit(c.call(name))
}

// wantBoth checks that the functions were called whose rows are stored.
func (c *calls) wantBoth(t testing.TB, db *gorm.DB, want ...string) {
	t.Helper()
	c.want(t, want...)
	if got := names(t, db); !slices.Equal(got, want) {
		t.Errorf("rows stored: %q, want %q", got, want)
	}
}

// recorder is a logger that keeps what it is told.
type recorder struct {
	logger.Interface

	mu     sync.Mutex
	errors []string
	traces []string
}

func newRecorder() *recorder { return &recorder{Interface: logger.Discard} }

func (r *recorder) LogMode(logger.LogLevel) logger.Interface { return r }

func (r *recorder) Error(_ context.Context, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func (r *recorder) Trace(_ context.Context, _ time.Time, fc func() (string, int64), err error) {
	query, rows := fc()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.traces = append(r.traces, fmt.Sprintf("%s -- %d rows, %v", query, rows, err))
}

package outbox_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/gorm/schema"
	"gorm.io/gorm/utils/tests"
	"gorm.io/plugin/dbresolver"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestInitializeAgain(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	c, r := relayed(nil)
	in := setUp(t, db, c)
	if err := in.Initialize(db); err != nil {
		t.Errorf("second Initialize: %v", err)
	}
	publish(t, db, message("t"))
	drain(t, in)
	if got := r.types(); !slices.Equal(got, []string{"t"}) {
		t.Errorf("delivered %v", got)
	}
	other := testdb.SQLite(t).Gorm(t)
	if err := other.Use(in); err == nil || !strings.Contains(err.Error(), "installed on another database") {
		t.Errorf("Use on another database: %v", err)
	}
}

// dbresolver opens its databases with the configuration of the first, plugins
// included. The instance stays with the primary.
func TestWithDBResolver(t *testing.T) {
	t.Parallel()
	primary, replica := testdb.SQLite(t), testdb.SQLite(t)
	for _, order := range []string{"before", "after"} {
		t.Run(order, func(t *testing.T) {
			db := primary.Gorm(t)
			resolver := dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{&sqlite.Dialector{Conn: replica.SQL(t)}}})
			c, r := relayed(nil)
			if order == "after" {
				if err := db.Use(resolver); err != nil {
					t.Fatal(err)
				}
			}
			in := setUp(t, db, c)
			if order == "before" {
				if err := db.Use(resolver); err != nil {
					t.Fatal(err)
				}
			}
			publish(t, db, message("t"))
			if n := drain(t, in); n != 1 || len(r.types()) != 1 {
				t.Errorf("%d messages delivered, want 1", n)
			}
		})
	}
}

// With several sources dbresolver may begin a transaction on a database where
// nobody would look for the message.
func TestTransactionOnAnotherSource(t *testing.T) {
	t.Parallel()
	primary, other := testdb.SQLite(t), testdb.SQLite(t)
	db := primary.Gorm(t)
	c, r := relayed(nil)
	in := setUp(t, db, c)
	source := &sqlite.Dialector{Conn: other.SQL(t)}
	if err := db.Use(dbresolver.Register(dbresolver.Config{Sources: []gorm.Dialector{source}})); err != nil {
		t.Fatal(err)
	}
	inTx(t, db.Clauses(dbresolver.Write), func(tx *gorm.DB) error {
		if err := outbox.Add(tx, message("lost")); !errors.Is(err, outbox.ErrNotInstalled) || !strings.Contains(err.Error(), "on another database") {
			t.Errorf("Add: %v, want ErrNotInstalled that tells why", err)
		}
		return nil
	})
	publish(t, db, message("kept"))
	drain(t, in)
	if got := r.types(); !slices.Equal(got, []string{"kept"}) {
		t.Errorf("delivered %v", got)
	}
}

func TestOtherDialects(t *testing.T) {
	t.Parallel()
	pool := testdb.SQLite(t).SQL(t)
	db, err := gorm.Open(tests.DummyDialector{}, &gorm.Config{ConnPool: pool})
	if err != nil {
		t.Fatal(err)
	}
	in, err := outbox.New(one(nil))
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Use(in); err == nil || !strings.Contains(err.Error(), `no storage for the dialect "dummy"; it must be postgres or sqlite`) {
		t.Errorf("Use: %v", err)
	}
}

func TestNoSchemaOnSQLite(t *testing.T) {
	t.Parallel()
	in, err := outbox.New(with(func(c *outbox.Config) { c.Schema = "app" }))
	if err != nil {
		t.Fatal(err)
	}
	if err := testdb.SQLite(t).Gorm(t).Use(in); err == nil || !strings.Contains(err.Error(), `Config.Schema is "app"; it must be empty`) {
		t.Errorf("Use: %v", err)
	}
}

// C13
func TestNames(t *testing.T) {
	t.Parallel()
	names := []string{"outbox", "App", `Out "Box"`, "select", "a.b", "%d %s", strings.Repeat("ü", 31), strings.Repeat("n", 63)}
	prefixed := &gorm.Config{Logger: logger.Discard, NamingStrategy: schema.NamingStrategy{TablePrefix: "app_", SingularTable: true}}
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		for i, name := range names {
			db := open(testdb.PoolSize(3), testdb.Config(&gorm.Config{Logger: prefixed.Logger, NamingStrategy: prefixed.NamingStrategy}))
			c, r := relayed(func(o *outbox.Outbox) { o.MaxAttempts = 1 })
			c.Table = name
			bad := errors.New("refused")
			c.Outboxes[0].Relay = outbox.Each(func(ctx context.Context, e outbox.Envelope) error {
				if e.Type == "bad" {
					return bad
				}
				return r.Deliver(ctx, []outbox.Envelope{e})
			})
			in := setUp(t, db, c)
			if err := in.AutoMigrate(t.Context()); err != nil {
				t.Errorf("%s: second AutoMigrate: %v", name, err)
			}
			publish(t, db, message("good"), message("bad"))
			drain(t, in)
			if got := r.types(); !slices.Equal(got, []string{"good"}) {
				t.Errorf("%s: delivered %v", name, got)
			}
			if n, err := in.DiscardWhere(t.Context(), "orders", outbox.Filter{Status: outbox.Dead}); n != 1 || err != nil {
				t.Errorf("table %d, %s: %d dead messages discarded, want 1: %v", i, name, n, err)
			}
		}
	})
}

func TestSchemaAndTables(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.Gorm(t, testdb.Param("search_path", "pg_catalog"))
	r := newRecorder()
	c := outbox.Config{
		Schema: pg.Schema, DefaultOutbox: "a",
		Outboxes: []outbox.Outbox{{Name: "a", Relay: r}, {Name: "b", Relay: r, Table: "b_messages"}},
	}
	in := setUp(t, db, c)
	publish(t, db, message("a"), outbox.Message{Outbox: "b", Type: "b"})
	drain(t, in)
	if got := slices.Sorted(slices.Values(r.types())); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("delivered %v", got)
	}
}

func TestAutoMigrateRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	if err := outbox.AutoMigrate(db); !errors.Is(err, outbox.ErrNotInstalled) {
		t.Errorf("AutoMigrate without the plugin: %v", err)
	}
	if err := outbox.AutoMigrate(nil); !errors.Is(err, outbox.ErrNotInstalled) {
		t.Errorf("AutoMigrate of nil: %v", err)
	}
	install(t, db, one(nil))
	inTx(t, db, func(tx *gorm.DB) error {
		if err := outbox.AutoMigrate(tx); err == nil || !strings.Contains(err.Error(), "in a transaction") {
			t.Errorf("AutoMigrate in a transaction: %v", err)
		}
		return nil
	})
}

func TestAutoMigrateFromSeveralNodes(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		var wg sync.WaitGroup
		for range 4 {
			db := open()
			in := install(t, db, one(nil))
			wg.Go(func() {
				if err := outbox.AutoMigrate(db); err != nil {
					t.Errorf("AutoMigrate: %v", err)
				}
				if err := in.Check(t.Context()); err != nil {
					t.Errorf("Check: %v", err)
				}
			})
		}
		wg.Wait()
	})
}

package outbox_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/glebarez/sqlite"
	"gorm.io/gorm"
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

func TestSchemaAndTables(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.Gorm(t, testdb.Param("search_path", "pg_catalog"))
	r := newRecorder()
	c := outbox.Config{
		Schema: pg.Schema, Table: `Out "Box"`, DefaultOutbox: "a",
		Outboxes: []outbox.Outbox{{Name: "a", Relay: r}, {Name: "b", Relay: r, Table: strings.Repeat("ü", 31)}},
	}
	in := setUp(t, db, c)
	if err := in.AutoMigrate(t.Context()); err != nil {
		t.Errorf("second AutoMigrate: %v", err)
	}
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

package gormoutbox_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/gormoutbox/outbox/gormoutbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestInstallWrapsOnce(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		config, statement := db.Config.ConnPool, db.Statement.ConnPool
		var inner gorm.ConnPool
		if cache, ok := config.(*gorm.PreparedStmtDB); ok {
			inner = cache.ConnPool
		}
		for range 2 {
			if err := gormoutbox.Install(db); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.Use(&plugin{}); err != nil {
			t.Fatal(err)
		}
		if db.Config.ConnPool != config || db.Statement.ConnPool != statement {
			t.Error("another Install changed the pool")
		}
		if cache, ok := config.(*gorm.PreparedStmtDB); ok && cache.ConnPool != inner {
			t.Error("another Install changed the pool under the cache")
		}
		var c calls
		if err := db.Transaction(func(tx *gorm.DB) error { c.add(t, tx, "row"); return nil }); err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "row")
	})
}

// The cache of statements that is in use stays, and so do its statements.
func TestInstallKeepsTheCache(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		before, ok := db.ConnPool.(*gorm.PreparedStmtDB)
		if ok != b.cached {
			t.Fatalf("the pool is a %T", db.ConnPool)
		}
		if !ok {
			return
		}
		inner := before.ConnPool
		if err := gormoutbox.Install(db); err != nil {
			t.Fatal(err)
		}
		for _, p := range []gorm.ConnPool{db.ConnPool, db.Statement.ConnPool} {
			after, ok := p.(*gorm.PreparedStmtDB)
			if !ok || after.Stmts != before.Stmts || after.Mux != before.Mux {
				t.Errorf("the pool is a %T, want the same cache", p)
			}
		}
		if before.ConnPool != inner {
			t.Error("a cache was changed that others may use")
		}
	})
}

func TestInstallByConfiguration(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.use(b.bare(gorm.Config{Plugins: map[string]gorm.Plugin{"test": &plugin{}}}))
		tx := db.Begin()
		defer tx.Rollback()
		from(t, tx)
	})
}

// Handles that were made before Install share what it wraps.
func TestInstallReachesEarlierHandles(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		earlier := db.Session(&gorm.Session{})
		if err := gormoutbox.Install(db); err != nil {
			t.Fatal(err)
		}
		tx := earlier.Begin()
		defer tx.Rollback()
		from(t, tx)
	})
}

// Install talks to no database.
func TestInstallOnADeadDatabase(t *testing.T) {
	t.Parallel()
	for _, cached := range []bool{false, true} {
		config, err := pgx.ParseConfig("postgres://127.0.0.1:1/nowhere")
		if err != nil {
			t.Fatal(err)
		}
		pool := stdlib.OpenDB(*config)
		t.Cleanup(func() { _ = pool.Close() })
		db, err := gorm.Open(postgres.New(postgres.Config{Conn: pool}), &gorm.Config{
			DisableAutomaticPing: true, Logger: logger.Discard, PrepareStmt: cached,
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := gormoutbox.Install(db); err != nil {
			t.Error(err)
		}
		tx := db.Begin()
		if _, err := gormoutbox.From(tx); err == nil || !errors.Is(err, tx.Error) {
			t.Errorf("From = %v, want %v", err, tx.Error)
		}
		if err := db.ConnPool.(interface{ Ping() error }).Ping(); err == nil {
			t.Error("the ping of the pool succeeded")
		}
	}
}

func TestInstallRefuses(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	tx := db.Begin()
	defer tx.Rollback()
	for name, handle := range map[string]*gorm.DB{
		"nil":              nil,
		"zero":             {},
		"a transaction":    tx,
		"without a pool":   {Config: &gorm.Config{Dialector: db.Dialector}, Statement: &gorm.Statement{}},
		"without a driver": {Config: &gorm.Config{ConnPool: db.ConnPool}, Statement: db.Statement},
	} {
		if err := gormoutbox.Install(handle); err == nil {
			t.Errorf("%s: Install succeeded", name)
		}
	}
	refused(t, "after a refused Install", tx, gormoutbox.ErrNotInstalled)
}

func TestPrimary(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		want, err := db.DB()
		if err != nil {
			t.Fatal(err)
		}
		check := func(what string, db *gorm.DB) {
			t.Helper()
			if got, err := gormoutbox.Primary(db); got != want || err != nil {
				t.Errorf("%s: Primary = %p, %v, want %p", what, got, err, want)
			}
			if got, err := db.DB(); got != want && what != "connection" {
				t.Errorf("%s: DB() = %p, %v, want %p", what, got, err, want)
			}
		}
		check("bare", b.use(db))
		if err := gormoutbox.Install(db); err != nil {
			t.Fatal(err)
		}
		db = b.use(db)
		check("installed", db)
		err = db.Transaction(func(tx *gorm.DB) error {
			check("transaction", tx)
			check("session of it", tx.Session(&gorm.Session{PrepareStmt: true}))
			return tx.Transaction(func(tx *gorm.DB) error { check("nested", tx); return nil })
		})
		if err != nil {
			t.Error(err)
		}
		err = db.Connection(func(conn *gorm.DB) error { check("connection", conn); return nil })
		if err != nil {
			t.Error(err)
		}
	})
}

func TestPrimaryRefuses(t *testing.T) {
	t.Parallel()
	for name, handle := range map[string]*gorm.DB{"nil": nil, "zero": {}, "no pool": {Config: &gorm.Config{}}} {
		if pool, err := gormoutbox.Primary(handle); err == nil || pool != nil {
			t.Errorf("%s: Primary = %v, %v, want an error", name, pool, err)
		}
	}
}

// After a failed Begin GORM's methods do what they do without Install.
func TestFailedBegin(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, b *bench) {
		db := b.open(t, gorm.Config{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		tx := db.WithContext(ctx).Begin()
		if !errors.Is(tx.Error, context.Canceled) {
			t.Fatalf("Begin: %v", tx.Error)
		}
		if err := tx.Create(&Row{Name: "x"}).Error; !errors.Is(err, context.Canceled) {
			t.Errorf("Create: %v", err)
		}
		if !b.cached && !b.session {
			if _, err := tx.DB(); !errors.Is(err, gorm.ErrInvalidDB) {
				t.Errorf("DB: %v, want %v", err, gorm.ErrInvalidDB)
			}
			if err := tx.Rollback().Error; !errors.Is(err, context.Canceled) || errors.Is(err, gorm.ErrInvalidTransaction) {
				t.Errorf("Rollback: %v", err)
			}
		}
		if err := tx.Commit().Error; !errors.Is(err, gorm.ErrInvalidTransaction) {
			t.Errorf("Commit: %v", err)
		}
		err := db.WithContext(ctx).Transaction(func(*gorm.DB) error { t.Error("the function ran"); return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Transaction: %v", err)
		}
	})
}

// otherPool is the wrapper of another library. begun is what its BeginTx
// returns for an *sql.Tx.
type otherPool struct {
	*sql.DB
	begun func(*sql.Tx) gorm.ConnPool
}

func (p *otherPool) BeginTx(ctx context.Context, opts *sql.TxOptions) (gorm.ConnPool, error) {
	tx, err := p.DB.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	return p.begun(tx), nil
}

func (p *otherPool) GetDBConn() (*sql.DB, error) { return p.DB, nil }

// otherTx is a transaction without StmtContext.
type otherTx struct {
	gorm.ConnPool
	gorm.TxCommitter
}

func TestPoolOfAnotherLibrary(t *testing.T) {
	t.Parallel()
	full := func(tx *sql.Tx) gorm.ConnPool { return tx }
	onEach(t, func(t *testing.T, b *bench) {
		db := b.bare(gorm.Config{})
		raw, err := db.DB()
		if err != nil {
			t.Fatal(err)
		}
		other := &otherPool{DB: raw, begun: full}
		if cache, ok := db.ConnPool.(*gorm.PreparedStmtDB); ok {
			cache.ConnPool = other
		} else {
			db.ConnPool, db.Statement.ConnPool = other, other
		}
		if err := errors.Join(db.AutoMigrate(&Row{}), gormoutbox.Install(db)); err != nil {
			t.Fatal(err)
		}
		if got, err := gormoutbox.Primary(db); got != raw {
			t.Errorf("Primary = %p, %v, want %p", got, err, raw)
		}
		db = b.use(db)
		var c calls
		if err := db.Transaction(func(tx *gorm.DB) error { c.add(t, tx, "row"); return nil }); err != nil {
			t.Fatal(err)
		}
		c.wantBoth(t, db, "row")

		other.begun = func(tx *sql.Tx) gorm.ConnPool {
			t.Cleanup(func() { _ = tx.Rollback() }) // GORM's cache forgets it
			return &otherTx{tx, tx}
		}
		tx := db.Begin()
		if b.cached || b.session {
			if !errors.Is(tx.Error, gorm.ErrInvalidTransaction) {
				t.Errorf("a cache of statements took a transaction without StmtContext (%v)", tx.Error)
			}
			return
		}
		refused(t, "a transaction that cannot be followed", tx, gormoutbox.ErrNotInstalled)
		if err := tx.Create(&Row{Name: "second"}).Error; err != nil {
			t.Error(err)
		}
		if err := tx.Commit().Error; err != nil {
			t.Error(err)
		}
		if got, want := names(t, db), []string{"row", "second"}; !slices.Equal(got, want) {
			t.Errorf("rows %q, want %q", got, want)
		}
	})
}

// onlyConn is a pool that begins no transactions.
type onlyConn struct{ gorm.ConnPool }

func TestPoolThatBeginsNothing(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	if err := db.AutoMigrate(&Row{}); err != nil {
		t.Fatal(err)
	}
	only := onlyConn{db.ConnPool}
	db.ConnPool, db.Statement.ConnPool = only, only
	if err := gormoutbox.Install(db); err != nil {
		t.Fatal(err)
	}
	if err := db.Begin().Error; !errors.Is(err, gorm.ErrInvalidTransaction) {
		t.Errorf("Begin: %v, want %v", err, gorm.ErrInvalidTransaction)
	}
	if err := db.Create(&Row{Name: "x"}).Error; err != nil {
		t.Errorf("Create, which does without: %v", err)
	}
	if _, err := gormoutbox.Primary(db); !errors.Is(err, gorm.ErrInvalidDB) {
		t.Errorf("Primary: %v, want %v", err, gorm.ErrInvalidDB)
	}
	if err := db.ConnPool.(interface{ Ping() error }).Ping(); !errors.Is(err, gorm.ErrInvalidDB) {
		t.Errorf("Ping: %v, want %v", err, gorm.ErrInvalidDB)
	}
}
